// One turn of a conversation: a question, its answers, and what can be done with them.

import { h, fill, table } from "./dom.js";
import { count, duration, number } from "./format.js";
import { COMPARED } from "./answer.js";
import { asCurl, asPython, copyButton } from "./share.js";

export class Turn {
  element;
  question;
  answers = [];
  #places = h("div", { class: "answers" });
  #verdict = h("p", { class: "verdict", role: "status" });
  #table = h("div", { class: "compared" });
  #calls;
  #request;

  // `request` is the body of its chat completion; `calls`: regenerate(turn), edit(turn), remove(turn).
  constructor(question, request, calls) {
    this.question = question;
    this.#request = request;
    this.#calls = calls;
    this.element = h("section", { class: "turn", "aria-label": `Turn: ${question.slice(0, 60)}` },
      h("div", { class: "question-row" }, h("p", { class: "question" }, question),
        h("div", { class: "question-actions" }, action("Edit", () => calls.edit(this)), action("Delete", () => calls.remove(this)))),
      this.#places, this.#verdict, this.#table);
  }

  get #isRace() {
    return this.#places.classList.contains("race");
  }

  // What goes into the messages of a later turn.
  get messages() {
    const [answer] = this.answers;
    if (!answer?.text || answer.state === "failed") return [];
    return [{ role: "user", content: this.question }, { role: "assistant", content: answer.text }];
  }

  get record() {
    return { question: this.question, request: this.#request, answers: this.answers.map((answer) => answer.record), verdict: this.#verdict.textContent };
  }

  add(answer, request) {
    this.answers.push(answer);
    this.#places.classList.toggle("race", this.answers.length > 1);
    this.#places.append(answer.element);
    fill(answer.actions, copyButton("Copy", () => answer.text), copyButton("Copy as curl", () => asCurl(request)),
      copyButton("Copy as Python", () => asPython(request)), action("Regenerate", () => this.#calls.regenerate(this)));
    this.#places.style.setProperty("--answers", this.answers.length);
  }

  conclude(verdict) {
    fill(this.#verdict, verdict);
  }

  // The verdict on two answers, and their numbers.
  compare() {
    if (!this.#isRace) return "";
    const titles = this.answers.map((answer, index) => `${"AB"[index]}: ${answer.title}`);
    fill(this.#verdict, judge(this.answers, this.answers.map((answer) => answer.title)));
    if (this.answers.every((answer) => answer.finish)) {
      fill(this.#table, table("Both runs", ["Measure", ...titles], COMPARED.map(([name, of]) => [name, ...this.answers.map((answer) => of(answer.finish, answer))])));
    }
    return this.#verdict.textContent;
  }
}

function action(name, does) {
  return h("button", { type: "button", class: "quiet small changing", onclick: does }, name);
}

// What the race shows: is it one text, and who had it first.
export function judge(answers, titles) {
  const [a, b] = answers;
  if (!b || !answers.every((answer) => answer.hasEnded)) return "Not compared: an answer did not end by itself.";
  const length = Math.max(a.tokens.ids.length, b.tokens.ids.length);
  const differ = Array.from({ length }, (_, i) => i).find((i) => a.tokens.ids[i] !== b.tokens.ids[i]);
  if (differ !== undefined) return h("strong", { class: "bad" }, `The texts differ from token ${differ + 1} on. That must not happen; please report it.`);
  const [fast, slow] = a.seconds <= b.seconds ? [0, 1] : [1, 0];
  const gap = answers[slow].seconds - answers[fast].seconds;
  const names = titles.map((title, index) => `${"AB"[index]} (${title})`);
  return [h("strong", null, `Same text, all ${count(length)} tokens. `),
    `${names[fast]} had it ${duration(gap)} sooner than ${names[slow]}: ${number(answers[slow].seconds / answers[fast].seconds, 2)} times as fast.`];
}
