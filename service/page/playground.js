// Chat with the model, see where each token came from, and let two configs race to the same text.

import { h, announce, field, fill, select } from "./dom.js";
import { count, duration, number } from "./format.js";
import { Answer } from "./answer.js";
import { GenerationSocket } from "./socket.js";
import { SpeculationPicker } from "./speculation.js";
import { Inspector, legend } from "./token_text.js";

const EXAMPLES = [
  ["Copy", "Repeat this list exactly, twice: amber, basalt, cedar, delta, ember, fjord, granite, harbor, indigo, juniper."],
  ["Code", "Write a Python class Point with x, y and z, and the methods __add__, __sub__ and __mul__."],
  ["Prose", "Explain in three sentences why the sky is blue."],
];
const SEED_SPAN = 2 ** 32;

export class Playground {
  #choices;
  #socket = new GenerationSocket();
  #inspector = new Inspector();
  #turns = []; // {question, answers}
  #cancels = [];
  #salt = crypto.getRandomValues(new Uint32Array(4)).join("-");
  #log = h("div", { class: "log" });
  #form;
  #prompt = h("textarea", { rows: 2, placeholder: "Ask something", "aria-label": "Message", enterkeyhint: "send" });
  #send = h("button", { class: "primary", type: "submit" }, "Send");
  #stop = h("button", { type: "button", hidden: true, onclick: () => this.cancel() }, "Stop");
  #clear = h("button", { class: "quiet", type: "button", onclick: () => this.clear() }, "New conversation");
  #compare = h("input", { type: "checkbox", id: "compare" });
  #order = select([["together", "at the same time"], ["in turn", "one after the other"]]);
  #legend = h("div");
  #left;
  #right;
  #rightSide;
  #sampling = samplingControls();

  constructor(section, choices) {
    this.#choices = choices;
    this.#left = new SpeculationPicker(choices, "Speculation");
    this.#right = new SpeculationPicker(choices, "Compared with", { value: "none" });
    this.#rightSide = h("div", { hidden: true }, this.#right.element, field("Run them", this.#order));
    this.#form = h("form", { class: "composer", onsubmit: (event) => this.#submit(event) }, this.#prompt,
      h("div", { class: "composer-row" }, this.#legend, h("span", { class: "spring" }), this.#clear, this.#stop, this.#send));
    this.#compare.addEventListener("change", () => (this.#rightSide.hidden = !this.#compare.checked));
    this.#prompt.addEventListener("keydown", (event) => this.#key(event));
    section.addEventListener("keydown", (event) => event.key === "Escape" && this.cancel());
    const controls = Object.values(this.#sampling).map((one) => one.element);
    fill(section,
      h("aside", { class: "settings", "aria-label": "Settings" },
        this.#left.element,
        h("div", { class: "check" }, this.#compare, h("label", { for: "compare" }, "Compare two side by side")),
        this.#rightSide,
        h("details", { open: matchMedia("(min-width: 60rem)").matches }, h("summary", null, "Sampling"), h("div", { class: "pairs" }, controls.slice(0, 6))),
        h("details", null, h("summary", null, "Texts"), controls.slice(6))),
      h("div", { class: "conversation" }, this.#log, this.#form),
      this.#inspector.element);
    this.#refresh();
    this.#greet();
  }

  // Profiles come and go: from experiments, from other fronts.
  shown() {
    this.#choices.load().then(() => this.#refresh(), () => {});
  }

  #refresh() {
    this.#left.refresh();
    this.#right.refresh();
    fill(this.#legend, legend(["target", ...this.#choices.sources]));
  }

  cancel() {
    for (const cancel of this.#cancels) cancel();
  }

  clear() {
    this.cancel();
    this.#turns = [];
    this.#setRunning(false);
    this.#greet();
    this.#prompt.focus();
  }

  #greet() {
    const examples = EXAMPLES.map(([name, text]) => h("button", { type: "button", class: "example", onclick: () => this.#try(text) },
      h("strong", null, name), h("span", null, text)));
    fill(this.#log, h("div", { class: "greeting" },
      h("h1", null, "Same answer, sooner"),
      h("p", null, "Coloured tokens were guessed by a proposer and confirmed by the target; plain ones are the target’s own. "
        + "Whatever guesses, the text is the same."),
      h("div", { class: "examples" }, examples)));
  }

  #try(text) {
    this.#prompt.value = text;
    this.#form.requestSubmit();
  }

  #key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.#form.requestSubmit();
  }

  #submit(event) {
    event.preventDefault();
    const question = this.#prompt.value.trim();
    if (!question || this.#cancels.length) return;
    this.#prompt.value = "";
    this.#ask(question);
  }

  async #ask(question) {
    if (!this.#turns.length) fill(this.#log);
    const turns = this.#turns;
    const isRace = this.#compare.checked;
    const pickers = isRace ? [this.#left, this.#right] : [this.#left];
    const body = this.#body(question);
    const answers = h("div", { class: `answers${isRace ? " race" : ""}` });
    const verdict = isRace ? h("p", { class: "verdict", role: "status" }) : null;
    this.#log.append(h("section", { class: "turn", "aria-label": `Turn ${turns.length + 1}` },
      h("p", { class: "question" }, question), answers, verdict));
    this.#setRunning(true);
    const sides = pickers.map((picker, index) => ({ picker, title: picker.title, label: isRace ? "AB"[index] : null }));
    const run = (side) => this.#run(side, body, answers);
    const isInTurn = isRace && this.#order.value === "in turn";
    const given = isInTurn ? await inTurn(sides, run) : await Promise.all(sides.map(run));
    if (turns !== this.#turns) return;
    this.#setRunning(false);
    const answer = given[0].tokens.text;
    if (answer && given[0].state !== "failed") turns.push({ question, answer });
    if (isRace) fill(verdict, judge(given, sides.map((side) => side.title)));
    announce(isRace ? verdict.textContent : `Answer ${given[0].state}, ${count(given[0].tokens.ids.length)} tokens`);
    this.#follow();
  }

  // One answer, from sending to its end.
  #run({ picker, title, label }, body, place) {
    const answer = new Answer(this.#inspector, label, title);
    place.append(answer.element);
    this.#follow();
    const request = { ...body };
    if (picker.request != null) request.speculation = picker.request;
    // Sides that raced share no cached prompt, so that neither profits from the other.
    if (label) request.cache_salt = `${this.#salt}-${label}`;
    return new Promise((resolve) => {
      answer.whenEnded(() => resolve(answer));
      const listener = answer.listener;
      this.#cancels.push(this.#socket.generate(request, {
        ...listener,
        tokens: (message) => {
          const isAtEnd = this.#isAtEnd();
          listener.tokens(message);
          if (isAtEnd) this.#follow();
        },
      }));
    });
  }

  #body(question) {
    const { seed, system, prediction, ...rest } = Object.fromEntries(Object.entries(this.#sampling).map(([name, one]) => [name, one.value]));
    const past = this.#turns.flatMap((turn) => [{ role: "user", content: turn.question }, { role: "assistant", content: turn.answer }]);
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...past, { role: "user", content: question }];
    const body = { messages, seed: seed ?? crypto.getRandomValues(new Uint32Array(1))[0] % SEED_SPAN };
    for (const [name, value] of Object.entries(rest)) if (value != null) body[name] = value;
    if (prediction) body.prediction = { type: "content", content: prediction };
    return body;
  }

  #setRunning(isRunning) {
    if (!isRunning) this.#cancels = [];
    const hadFocus = document.activeElement === this.#stop || document.activeElement === this.#send;
    this.#send.hidden = isRunning;
    this.#stop.hidden = !isRunning;
    if (hadFocus) (isRunning ? this.#stop : this.#prompt).focus();
  }

  #isAtEnd() {
    return this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight < 60;
  }

  #follow() {
    this.#log.scrollTop = this.#log.scrollHeight;
  }
}

// One side after the other; what is cancelled takes the rest with it.
async function inTurn(sides, run) {
  const given = [];
  for (const side of sides) {
    given.push(await run(side));
    if (given.at(-1).state !== "finished") break;
  }
  return given;
}

function samplingControls() {
  const numeric = (label, attributes, hint) => {
    const input = h("input", { type: "number", step: "any", ...attributes });
    return { element: field(label, input, hint), get value() { return input.value === "" ? null : Number(input.value); } };
  };
  const text = (label, hint) => {
    const input = h("textarea", { rows: 2 });
    return { element: field(label, input, hint), get value() { return input.value.trim(); } };
  };
  return {
    temperature: numeric("Temperature", { min: 0, max: 2, step: 0.1, value: 0.7 }),
    top_p: numeric("Top p", { min: 0, max: 1, step: 0.05, placeholder: "1" }),
    top_k: numeric("Top k", { min: 0, step: 1, placeholder: "all" }),
    min_p: numeric("Min p", { min: 0, max: 1, step: 0.01, placeholder: "0" }),
    max_tokens: numeric("Most tokens", { min: 1, step: 1, value: 200 }),
    seed: numeric("Seed", { step: 1, placeholder: "drawn" }),
    system: text("System message"),
    prediction: text("Predicted answer", "Text you expect in the answer; feeds guessing."),
  };
}

// What the race shows: is it one text, and who had it first.
export function judge(answers, titles) {
  const [a, b] = answers;
  if (!b || answers.some((answer) => answer.state !== "finished")) return "Not compared: an answer did not end by itself.";
  const length = Math.max(a.tokens.ids.length, b.tokens.ids.length);
  const differ = Array.from({ length }, (_, i) => i).find((i) => a.tokens.ids[i] !== b.tokens.ids[i]);
  if (differ !== undefined) return h("strong", { class: "bad" }, `The texts differ from token ${differ + 1} on. That must not happen; please report it.`);
  const [fast, slow] = a.seconds <= b.seconds ? [0, 1] : [1, 0];
  const gap = answers[slow].seconds - answers[fast].seconds;
  const names = titles.map((title, index) => `${"AB"[index]} (${title})`);
  return [h("strong", null, `Same text, all ${count(length)} tokens. `),
    `${names[fast]} had it ${duration(gap)} sooner than ${names[slow]}: ${number(answers[slow].seconds / answers[fast].seconds, 2)} times as fast.`];
}
