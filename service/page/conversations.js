// Conversations kept in this browser, newest first.

import { h, fill } from "./dom.js";

const KEY = "forerun-conversations";
const MAX_KEPT = 100;
const TITLE_LENGTH = 60;

// A setting of the page that outlives its tab; without storage it lasts as long as the tab.
export function remembered(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(name, value);
    return true;
  } catch {
    return false; // full, or not allowed
  }
}

export class Conversations {
  element = h("details", { class: "past" });
  #list = h("ul");
  #summary = h("summary");
  #all;
  #current = null;
  #open;

  // `open` is called with the conversation to show; `removed` with the id of one that is gone.
  constructor(open, removed) {
    this.#open = open;
    this.#all = h("button", { type: "button", class: "quiet small", onclick: () => {
      for (const { id } of this.#read()) removed(id);
      this.#write([]);
    } }, "Delete all conversations");
    this.removed = removed;
    fill(this.element, this.#summary, this.#list, this.#all);
    window.addEventListener("storage", (event) => event.key === KEY && this.#show());
    this.#show();
  }

  set current(id) {
    this.#current = id;
    this.#show();
  }

  // Keeps a conversation, in place of what was kept of it; the oldest make room. One without turns is not kept.
  keep(conversation) {
    const others = this.#read().filter((one) => one.id !== conversation.id);
    this.#write(conversation.turns.length ? [conversation, ...others] : others);
  }

  #remove(id) {
    this.#write(this.#read().filter((one) => one.id !== id));
    this.removed(id);
    this.#summary.focus();
  }

  #read() {
    try {
      const kept = JSON.parse(remembered(KEY) ?? "[]");
      return Array.isArray(kept) ? kept.filter((one) => Array.isArray(one?.turns)) : [];
    } catch {
      return [];
    }
  }

  #write(all) {
    let kept = all.slice(0, MAX_KEPT);
    while (!remember(KEY, JSON.stringify(kept)) && kept.length) kept = kept.slice(0, -1);
    this.#show();
  }

  #show() {
    const all = this.#read();
    this.element.hidden = !all.length;
    fill(this.#summary, `Conversations (${all.length})`);
    fill(this.#list, all.map((one) => h("li", null,
      h("button", { type: "button", class: "quiet", "aria-current": one.id === this.#current ? "true" : null, onclick: () => this.#open(one) }, one.title),
      h("button", { type: "button", class: "quiet remove", "aria-label": `Delete conversation ${one.title}`, onclick: () => this.#remove(one.id) }, "✕"))));
  }
}

export function titleOf(question) {
  const line = question.replaceAll(/\s+/g, " ");
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1)}…` : line;
}
