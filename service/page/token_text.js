// An answer's text, token by token: each in the colour of where it came from, and ready to tell about itself.

import { h } from "./dom.js";
import { number, percent, words } from "./format.js";

export class TokenText {
  element;
  ids = [];
  sources = [];
  #entries = [];
  #shown = 0;
  #depth = 0;
  #inspector;

  constructor(inspector, label) {
    this.#inspector = inspector;
    this.element = h("div", { class: "tokens", role: "group", "aria-label": label, onkeydown: (event) => this.#walk(event) });
  }

  // Of an answer that is shown again, only the text is known.
  set text(text) {
    this.element.textContent = text;
  }

  get text() {
    return this.element.textContent;
  }

  // What is new: its text, and tokens with the offsets at which they begin. Offsets count characters, not UTF-16 units.
  // Text before the first of them belongs to the token that was last.
  append(text, tokens) {
    const characters = [...text];
    let from = 0;
    for (const token of tokens) {
      const begin = Math.max(token.offset - this.#shown, from);
      this.#grow(characters.slice(from, begin).join(""));
      this.#begin(token);
      from = begin;
    }
    this.#grow(characters.slice(from).join(""));
    this.#shown += characters.length;
  }

  #grow(text) {
    if (text && this.#entries.length) this.#entries.at(-1).span.append(text);
  }

  #begin(token) {
    this.ids.push(token.id);
    this.sources.push(token.source);
    const isGuess = !["target", "prompt", "unknown"].includes(token.source);
    this.#depth = isGuess ? this.#depth + 1 : 0;
    const about = { ...token, position: this.ids.length, depth: this.#depth };
    const last = this.#entries.at(-1);
    if (last && !last.span.textContent) {
      // Tokens that only together are a character stand together.
      last.tokens.push(about);
      last.span.dataset.source = token.source;
      return;
    }
    const entry = { tokens: [about], span: h("span", { class: "token", "data-source": token.source }) };
    entry.span.tabIndex = this.#entries.length ? -1 : 0;
    for (const event of ["pointerenter", "focus"]) {
      entry.span.addEventListener(event, () => this.#inspector.show(entry.span, describe(entry)));
    }
    for (const event of ["pointerleave", "blur"]) entry.span.addEventListener(event, () => this.#inspector.hide());
    this.#entries.push(entry);
    this.element.append(entry.span);
  }

  // Arrow keys go from token to token; the tab key sees one.
  #walk(event) {
    const spans = this.#entries.map((entry) => entry.span);
    const here = spans.indexOf(document.activeElement);
    const to = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (here < 0 || to === undefined) return;
    event.preventDefault();
    const next = spans[Math.min(Math.max(to, 0), spans.length - 1)];
    spans[here].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

// The small card beside a token.
export class Inspector {
  element = h("div", { class: "tip", role: "tooltip", id: "token-tip", hidden: true });
  #target = null;

  constructor() {
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.hide());
    document.addEventListener("scroll", () => this.hide(), { capture: true, passive: true });
  }

  show(target, lines) {
    this.hide();
    this.#target = target;
    target.setAttribute("aria-describedby", this.element.id);
    this.element.replaceChildren(...lines);
    this.element.hidden = false;
    const box = target.getClientRects()[0] ?? target.getBoundingClientRect();
    const { width, height } = this.element.getBoundingClientRect();
    const left = Math.min(Math.max(box.left, 8), document.documentElement.clientWidth - width - 8);
    const top = box.top > height + 12 ? box.top - height - 6 : box.bottom + 6;
    this.element.style.left = `${left}px`;
    this.element.style.top = `${top}px`;
  }

  hide() {
    this.#target?.removeAttribute("aria-describedby");
    this.#target = null;
    this.element.hidden = true;
  }
}

// One patch of colour and a name for each source.
export function legend(sources) {
  return h("ul", { class: "legend", "aria-label": "Where a token came from" },
    sources.map((source) => h("li", null, h("span", { class: "swatch", "data-source": source }), named(source))));
}

export function named(source) {
  return source === "target" ? "target" : words(source);
}

function describe(entry) {
  return entry.tokens.flatMap((token) => [
    h("p", { class: "tip-token" }, h("code", null, visible(entry.span.textContent)), h("span", null, `id ${token.id}`)),
    h("p", null, h("span", { class: "swatch", "data-source": token.source }), origin(token)),
    h("p", null, `position ${token.position}`, token.logprob == null ? null :
      ` · logprob ${number(token.logprob, 3)} (${percent(Math.exp(token.logprob), { digits: 1 })})`),
    alternatives(token),
  ]).filter(Boolean);
}

// The likeliest tokens in this place, as far as the request asked for them.
function alternatives({ id, alternatives: rows }) {
  return rows?.length ? h("ol", { class: "alternatives" }, rows.map(([other, text, logprob]) =>
    h("li", { class: other === id ? "chosen" : null }, h("code", null, visible(text)), h("span", null, percent(Math.exp(logprob), { digits: 1 }))))) : null;
}

function origin(token) {
  if (token.source === "prompt") return "from the prompt";
  if (token.source === "unknown") return "not said by event streams";
  if (!token.depth) return "from the target model";
  return `drafted by ${named(token.source)}, place ${token.depth} of its draft`;
}

function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "(no text)";
}
