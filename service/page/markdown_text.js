// Markdown as elements: the service parses it into a tree of tags and texts, which is built here tag by tag.

import { h } from "./dom.js";
import { call } from "./api.js";
import { copyButton } from "./share.js";

const TAGS = new Set(["p", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "ul", "ol", "li", "hr", "br", "pre", "code", "em",
  "strong", "s", "a", "table", "thead", "tbody", "tr", "th", "td", "span"]);
const MIN_PAUSE_MS = 250;
const HEADINGS_BELOW = 2; // an answer has a heading of this level

export class MarkdownText {
  element = h("div", { class: "markdown plain" });
  #text = "";
  #isEnded = false;
  #rendered = null; // the text that the blocks are of
  #blocks = []; // JSON of each
  #isShown = () => true;
  #isRunning = false;
  #timer = null;

  // `isShown`: whether anybody sees it; else nothing is rendered.
  constructor(isShown) {
    this.#isShown = isShown;
  }

  // The text so far. `isEnded`: it is whole, and rendered as soon as possible.
  update(text, isEnded = false) {
    this.#text = text;
    this.#isEnded = isEnded;
    if (this.#rendered === null) this.element.textContent = text;
    this.refresh();
  }

  // Renders what is not yet rendered, if it is seen.
  refresh() {
    if (this.#isRunning || !this.#isShown() || this.#rendered === this.#text) return;
    if (this.#timer !== null && !this.#isEnded) return;
    clearTimeout(this.#timer);
    this.#timer = null;
    this.#render();
  }

  async #render() {
    const text = this.#text;
    const began = performance.now();
    this.#isRunning = true;
    try {
      this.#show(await call("POST", "page/markdown", { text }));
    } catch {
      this.#blocks = [];
      this.element.classList.add("plain");
      this.element.textContent = this.#text;
    }
    this.#rendered = text;
    this.#isRunning = false;
    // An answer that is being written is rendered in a tenth of the time at most: the engine has better to do.
    const pause = Math.max(MIN_PAUSE_MS, 10 * (performance.now() - began));
    if (this.#isEnded) return this.refresh();
    this.#timer = setTimeout(() => {
      this.#timer = null;
      this.refresh();
    }, pause);
  }

  // Blocks that are as before stay, so that what is selected stays selected.
  #show(tree) {
    const blocks = tree.map((node) => JSON.stringify(node));
    const first = blocks.findIndex((block, index) => block !== this.#blocks[index]);
    const kept = first < 0 ? blocks.length : first;
    if (this.element.classList.contains("plain")) this.element.replaceChildren();
    this.element.classList.remove("plain");
    while (this.element.childNodes.length > kept) this.element.lastChild.remove();
    this.element.append(...tree.slice(kept).map(build));
    this.#blocks = blocks;
  }
}

function build(node) {
  if (typeof node === "string") return document.createTextNode(node);
  const [tag, attributes, children] = node;
  const level = /^h([1-6])$/.exec(tag)?.[1];
  const name = level ? `h${Math.min(6, Number(level) + HEADINGS_BELOW)}` : TAGS.has(tag) ? tag : "span";
  const element = h(name, allowed(tag, attributes), children.map(build));
  if (tag === "pre") {
    element.tabIndex = 0;
    return h("div", { class: "code" }, h("div", { class: "code-bar" }, h("span", null, attributes["data-language"] ?? "code"),
      copyButton("Copy code", () => element.textContent)), element);
  }
  if (tag !== "table") return element;
  element.setAttribute("aria-label", "Table in the answer");
  return h("div", { class: "scroll", tabindex: 0 }, element);
}

function allowed(tag, { class: css, href, start, "data-align": align }) {
  const found = {};
  if (/^[a-z]\w{0,3}$/.test(css ?? "")) found.class = css;
  if (tag === "a" && /^(https?|mailto):/i.test(href ?? "")) Object.assign(found, { href, target: "_blank", rel: "noopener noreferrer nofollow" });
  if (tag === "ol" && /^\d+$/.test(start ?? "")) found.start = start;
  if (["left", "center", "right"].includes(align)) found["data-align"] = align;
  return found;
}
