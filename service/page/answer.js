// One answer: who gives it, how fast, and its text, as Markdown and token by token.

import { h, fill } from "./dom.js";
import { config, count, duration, number, percent, words } from "./format.js";
import { MarkdownText } from "./markdown_text.js";
import { TokenText } from "./token_text.js";

const COUNTERS = {
  speed: "tokens / s",
  acceptance: "mean acceptance length",
  ttft: "to first token",
  saved: "saved",
};
// How an answer can end, in words.
const STATES = { finished: "finished", limit: "stopped at the token limit", cancelled: "cancelled", failed: "failed" };

export class Answer {
  element;
  tokens;
  markdown;
  title;
  state = "waiting";
  seconds = null; // from sending to the end
  finish = null; // the service's last message
  actions = h("div", { class: "answer-actions" });
  #values = {};
  #heading;
  #ran = h("p", { class: "ran" });
  #note = h("p", { class: "answer-note" });
  #sentAt = performance.now();
  #firstAt = null;
  #lastAt = null;
  #frame = 0;
  // Why the answer came over an event stream; undefined where it came over the WebSocket.
  #notice;

  // `isMarkdownShown`: whether the view is that of the text, not that of the tokens.
  constructor(inspector, label, title, isMarkdownShown) {
    this.title = title;
    this.tokens = new TokenText(inspector, `Answer by ${title}, token by token; arrow keys move`);
    this.markdown = new MarkdownText(isMarkdownShown);
    const counters = Object.entries(COUNTERS).map(([name, text]) => {
      this.#values[name] = h("dd", { "data-counter": name }, "–");
      return h("div", null, h("dt", null, text), this.#values[name]);
    });
    this.#heading = h("h2", null, label ? h("span", { class: "side" }, label) : null, title);
    this.element = h("article", { class: "answer", "aria-busy": "true", "aria-label": `Answer by ${title}` },
      h("header", null, this.#heading, this.#ran), h("dl", { class: "counters" }, counters),
      h("div", { class: "answer-text" }, this.markdown.element, this.tokens.element), this.#note, this.actions);
  }

  get text() {
    return this.tokens.text;
  }

  get hasEnded() {
    return this.state === "finished" || this.state === "limit";
  }

  // What is kept of an answer: what it shows, without its tokens.
  get record() {
    const counters = Object.fromEntries(Object.entries(this.#values).map(([name, one]) => [name, one.textContent]));
    return { title: this.title, text: this.text, state: this.state, ran: this.#ran.textContent, note: this.#note.textContent, counters };
  }

  restore({ text, state, ran, note, counters }) {
    this.state = state;
    this.tokens.text = text;
    this.markdown.update(text, true);
    for (const name of Object.keys(COUNTERS)) this.#put(name, counters?.[name] ?? "–");
    fill(this.#ran, ran ?? "");
    fill(this.#note, note ?? "");
    this.element.setAttribute("aria-busy", "false");
    this.element.dataset.state = state;
  }

  // Listens to the socket.
  get listener() {
    return {
      started: (message) => this.#begin(message),
      tokens: (message) => this.#add(message),
      finished: (message) => this.#end(message),
      failed: (text) => this.#fail(text),
    };
  }

  // Calls `then` once when the answer has ended, in whatever way.
  whenEnded(then) {
    this.ended = then;
  }

  // Which config answers: the service's default and an experiment's arm are not chosen here.
  #begin({ experiment, arm, speculation, notice }) {
    this.#notice = notice;
    const config_ = speculation ? config(speculation) : "";
    if (experiment) fill(this.#ran, `experiment ${experiment}, arm ${arm}${config_ && `: ${config_}`}`);
    else fill(this.#ran, config_ === this.title ? "" : config_);
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
    this.markdown.update(this.text);
  }

  #end(message) {
    const reasons = message.choices.map((choice) => choice.finish_reason);
    this.state = reasons.includes("abort") ? "cancelled" : reasons.includes("length") ? "limit" : "finished";
    this.finish = message;
    const { timing, speculative_decoding: guessed } = message.metrics;
    // What came all at once has no speed.
    this.#put("speed", timing.tpot > 0.0001 ? number(1 / timing.tpot) : "–");
    this.#put("acceptance", guessed.num_spec_steps ? number(guessed.mean_acceptance_length, 2) : "–");
    this.#put("ttft", timing.tokens ? duration(timing.ttft) : "–");
    this.#put("saved", guessed.num_spec_steps ? duration(guessed.saved_seconds) : "–");
    fill(this.#note, h("span", { class: `state ${this.state}` }, STATES[this.state]), ` · ${[...remarks(message), ...(this.#notice ? [this.#notice] : [])].join(" · ")}`);
    this.#close();
  }

  #fail(text) {
    this.state = "failed";
    fill(this.#note, h("span", { class: "state failed" }, STATES.failed), ` · ${text}`);
    this.#note.setAttribute("role", "alert");
    this.#close();
  }

  #close() {
    this.seconds = (performance.now() - this.#sentAt) / 1000;
    cancelAnimationFrame(this.#frame);
    this.markdown.update(this.text, true);
    this.element.setAttribute("aria-busy", "false");
    this.element.dataset.state = this.state;
    this.ended?.();
  }

  #put(name, text) {
    this.#values[name].textContent = text;
  }
}

function remarks({ usage, metrics, seed }) {
  const guessed = metrics.speculative_decoding;
  const said = [`${count(usage.completion_tokens)} tokens`];
  if (guessed.num_spec_steps) {
    const rate = percent(guessed.draft_acceptance_rate);
    said.push(`${count(guessed.num_spec_steps)} drafts, ${count(guessed.num_accepted_draft_tokens)} of `
      + `${count(guessed.num_draft_tokens)} draft tokens accepted (${rate})`);
  }
  const skipped = Object.entries(guessed.skipped).filter(([reason]) => reason !== "disabled");
  if (skipped.length) said.push(`no draft: ${skipped.map(([reason, times]) => `${words(reason)} ${count(times)}`).join(", ")}`);
  if (metrics.timing.cached_tokens) said.push(`${count(metrics.timing.cached_tokens)} prompt tokens from cache`);
  said.push(`seed ${seed}`);
  return said;
}

// The numbers of two answers to one request, side by side.
export const COMPARED = [
  ["Output tokens", ({ usage }) => count(usage.completion_tokens)],
  ["Total time", (_, answer) => duration(answer.seconds)],
  ["Time to first token", ({ metrics }) => duration(metrics.timing.ttft)],
  ["Tokens / s", ({ metrics }) => metrics.timing.tpot > 0.0001 ? number(1 / metrics.timing.tpot) : "–"],
  ["Mean acceptance length", ({ metrics: { speculative_decoding: one } }) => one.num_spec_steps ? number(one.mean_acceptance_length, 2) : "–"],
  ["Draft tokens accepted", ({ metrics: { speculative_decoding: one } }) =>
    one.num_draft_tokens ? `${count(one.num_accepted_draft_tokens)} of ${count(one.num_draft_tokens)}` : "–"],
  ["Time saved (estimate)", ({ metrics: { speculative_decoding: one } }) => one.num_spec_steps ? duration(one.saved_seconds) : "–"],
  ["Prompt tokens from cache", ({ metrics }) => count(metrics.timing.cached_tokens ?? 0)],
];
