// One answer: who gives it, how fast, and its text.

import { h, fill } from "./dom.js";
import { count, duration, number, percent, words } from "./format.js";
import { TokenText } from "./token_text.js";

const COUNTERS = {
  speed: "tokens / s",
  acceptance: "mean acceptance length",
  ttft: "to first token",
  saved: "saved",
};

export class Answer {
  element;
  tokens;
  state = "waiting";
  seconds = null; // from sending to the end
  finish = null; // the service's last message
  #values = {};
  #note = h("p", { class: "answer-note" });
  #sentAt = performance.now();
  #firstAt = null;
  #lastAt = null;
  #frame = 0;

  constructor(inspector, label, title) {
    this.tokens = new TokenText(inspector, `Answer by ${title}, token by token; arrow keys move`);
    const counters = Object.entries(COUNTERS).map(([name, text]) => {
      this.#values[name] = h("dd", { "data-counter": name }, "–");
      return h("div", null, h("dt", null, text), this.#values[name]);
    });
    this.element = h("article", { class: "answer", "aria-busy": "true", "aria-label": `Answer by ${title}` },
      h("header", null,
        h("h3", null, label ? h("span", { class: "side" }, label) : null, title),
        h("dl", { class: "counters" }, counters)),
      this.tokens.element, this.#note);
  }

  // Listens to the socket.
  get listener() {
    return {
      tokens: (message) => this.#add(message),
      finished: (message) => this.#end(message),
      failed: (text) => this.#fail(text),
    };
  }

  // Calls `then` once when the answer has ended, in whatever way.
  whenEnded(then) {
    this.ended = then;
  }

  #add(message) {
    this.state = "streaming";
    this.#lastAt = performance.now();
    this.#firstAt ??= this.#lastAt;
    this.tokens.append(message.text, message.tokens);
    this.#frame ||= requestAnimationFrame(() => this.#show());
  }

  // What can be known while it streams. A draft of which nothing was right looks like no draft from here, so the mean
  // acceptance length is at least what is shown; the service has the last word.
  #show() {
    this.#frame = 0;
    if (this.finish) return;
    const numTokens = this.tokens.ids.length;
    const numOwn = this.tokens.sources.filter((source) => source === "target").length;
    const seconds = (this.#lastAt - this.#firstAt) / 1000;
    this.#put("speed", seconds > 0.05 ? number((numTokens - 1) / seconds) : "–");
    this.#put("acceptance", numOwn ? `≥ ${number(numTokens / numOwn, 2)}` : "–");
    this.#put("ttft", duration((this.#firstAt - this.#sentAt) / 1000));
  }

  #end(message) {
    this.state = message.choices.some((choice) => choice.finish_reason === "abort") ? "cancelled" : "finished";
    this.finish = message;
    const { timing, speculative_decoding: guessed } = message.metrics;
    // What came all at once has no speed.
    this.#put("speed", timing.tpot > 0.0001 ? number(1 / timing.tpot) : "–");
    this.#put("acceptance", guessed.num_spec_steps ? number(guessed.mean_acceptance_length, 2) : "–");
    this.#put("ttft", timing.tokens ? duration(timing.ttft) : "–");
    this.#put("saved", guessed.num_spec_steps ? duration(guessed.saved_seconds) : "–");
    fill(this.#note, h("span", { class: `state ${this.state}` }, this.state), ` · ${remarks(message).join(" · ")}`);
    this.#close();
  }

  #fail(text) {
    this.state = "failed";
    fill(this.#note, h("span", { class: "state failed" }, "failed"), ` · ${text}`);
    this.#note.setAttribute("role", "alert");
    this.#close();
  }

  #close() {
    this.seconds = (performance.now() - this.#sentAt) / 1000;
    cancelAnimationFrame(this.#frame);
    this.element.setAttribute("aria-busy", "false");
    this.element.dataset.state = this.state;
    this.ended?.();
  }

  #put(name, text) {
    this.#values[name].textContent = text;
  }
}

function remarks({ choices, usage, metrics, seed }) {
  const guessed = metrics.speculative_decoding;
  const said = [`${count(usage.completion_tokens)} tokens`];
  if (choices[0]?.finish_reason === "length") said.push("cut at the most tokens allowed");
  if (guessed.num_spec_steps) {
    const rate = percent(guessed.draft_acceptance_rate);
    said.push(`${count(guessed.num_spec_steps)} drafts, ${count(guessed.num_accepted_draft_tokens)} of `
      + `${count(guessed.num_draft_tokens)} guesses right (${rate})`);
  }
  const skipped = Object.entries(guessed.skipped).filter(([reason]) => reason !== "disabled");
  if (skipped.length) said.push(`no draft: ${skipped.map(([reason, times]) => `${words(reason)} ${count(times)}`).join(", ")}`);
  if (metrics.timing.cached_tokens) said.push(`${count(metrics.timing.cached_tokens)} prompt tokens from cache`);
  said.push(`seed ${seed}`);
  return said;
}
