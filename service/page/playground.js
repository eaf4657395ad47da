// Chat with the model, see where each token came from, and let two configs race to the same text.

import { h, announce, field, fill, select } from "./dom.js";
import { count } from "./format.js";
import { Answer } from "./answer.js";
import { Conversations, remember, remembered, titleOf } from "./conversations.js";
import { Sampling } from "./sampling.js";
import { asMarkdown, download } from "./share.js";
import { GenerationSocket } from "./socket.js";
import { SpeculationPicker } from "./speculation.js";
import { Inspector, legend } from "./token_text.js";
import { Turn } from "./turn.js";

const VIEW = "forerun-view";
const EXAMPLES = [
  ["Format", "Format this JSON with one key on each line:\n\n```json\n"
    + '{"name": "Alice Brown", "item": "brass lamp", "count": 3, "address": "12 Hill Road, Springfield", "phone": "555 0134"}\n```'],
  ["Extract", "Write this order as a JSON object with the keys name, item, count and address:\n\n"
    + "name: Alice Brown\nitem: brass lamp\ncount: 3\naddress: 12 Hill Road, Springfield\nphone: 555 0134"],
  ["Explain", "Explain in three sentences why the sky is blue."],
];

export class Playground {
  #section;
  #choices;
  #socket = new GenerationSocket();
  #inspector = new Inspector();
  #turns = [];
  #id = crypto.randomUUID?.() ?? String(Math.random()); // of the conversation
  #wasShown = false;
  #editing = null; // the turn that the next message replaces
  #cancels = [];
  #salt = crypto.getRandomValues(new Uint32Array(4)).join("-");
  #log = h("div", { class: "log" });
  #form;
  #prompt = h("textarea", { rows: 2, placeholder: "Ask something", "aria-label": "Message", enterkeyhint: "send" });
  #system = h("textarea", { rows: 2, id: "system", placeholder: "You are a helpful assistant." });
  #systemBox;
  #send = h("button", { class: "primary", type: "submit" }, "Send");
  #stop = h("button", { type: "button", hidden: true, onclick: () => this.cancel() }, "Stop");
  #view = h("button", { type: "button", class: "switch", role: "switch", "aria-checked": "false", onclick: () => this.#toggleView() }, "Tokens");
  #menu = h("button", { type: "button", class: "menu", "aria-expanded": "false", onclick: () => this.#toggleMenu() }, "Settings");
  #export;
  #meter = h("meter", { min: 0, "aria-label": "Context used" });
  #used = h("span");
  #context = h("p", { class: "context", hidden: true }, this.#meter, this.#used);
  #editNote = h("p", { class: "editing", hidden: true });
  #compare = h("input", { type: "checkbox", id: "compare" });
  #order = select([["together", "at the same time"], ["in turn", "one after the other"]]);
  #legend = h("div", { class: "legend-place" });
  #left;
  #right;
  #rightSide;
  #sampling = new Sampling();
  #past = new Conversations((kept) => this.#reopen(kept), (id) => id === this.#id && this.clear());

  constructor(section, choices) {
    this.#section = section;
    this.#choices = choices;
    this.#left = new SpeculationPicker(choices, "Speculation");
    this.#right = new SpeculationPicker(choices, "Compared with", { value: "none" });
    this.#rightSide = h("div", { hidden: true }, this.#right.element, field("Run them", this.#order));
    this.#form = h("form", { class: "composer", onsubmit: (event) => this.#submit(event) }, this.#editNote, this.#prompt,
      h("div", { class: "composer-row" }, this.#context, h("span", { class: "spring" }), this.#stop, this.#send));
    this.#compare.addEventListener("change", () => (this.#rightSide.hidden = !this.#compare.checked));
    this.#prompt.addEventListener("keydown", (event) => this.#key(event));
    section.addEventListener("keydown", (event) => event.key === "Escape" && this.#escape());
    this.#systemBox = h("details", { class: "system" }, h("summary", null, "System prompt"), field("Sent before the conversation", this.#system));
    this.#export = h("div", { class: "export" },
      h("button", { type: "button", class: "quiet small", onclick: () => this.#download("md", "text/markdown", asMarkdown(this.#record)) }, "Export as Markdown"),
      h("button", { type: "button", class: "quiet small", onclick: () => this.#download("json", "application/json", JSON.stringify(this.#record, null, 2)) }, "Export as JSON"));
    fill(section, h("h1", { class: "unseen" }, "Playground"),
      h("aside", { class: "settings", "aria-label": "Settings" },
        this.#past.element,
        this.#left.element,
        h("div", { class: "check" }, this.#compare, h("label", { for: "compare" }, "Compare two side by side")),
        this.#rightSide,
        h("details", { open: true }, h("summary", null, "Sampling"), h("div", { class: "pairs" }, this.#sampling.numbers), this.#sampling.ends),
        h("details", null, h("summary", null, "Prediction"), this.#sampling.expects)),
      h("div", { class: "conversation" },
        h("div", { class: "conversation-bar" }, this.#menu,
          h("button", { class: "quiet small", type: "button", onclick: () => this.clear() }, "New conversation"),
          this.#export, h("span", { class: "spring" }), this.#legend, this.#view),
        this.#systemBox, this.#log, this.#form),
      this.#inspector.element);
    this.#show(remembered(VIEW) ?? "text");
    this.#refresh();
    this.#greet();
  }

  // Profiles come and go: from experiments, from other fronts. The first time they have just been loaded.
  shown() {
    if (!this.#wasShown) return void (this.#wasShown = true);
    this.#choices.load().then(() => this.#refresh(), () => {});
  }

  #refresh() {
    this.#left.refresh();
    this.#right.refresh();
    fill(this.#legend, legend(["target", ...this.#choices.sources]));
  }

  #toggleView() {
    const view = this.#isTextShown ? "tokens" : "text";
    remember(VIEW, view);
    this.#show(view);
  }

  get #isTextShown() {
    return this.#section.dataset.view !== "tokens";
  }

  #show(view) {
    this.#section.dataset.view = view;
    this.#view.setAttribute("aria-checked", String(view === "tokens"));
    for (const turn of this.#turns) for (const answer of turn.answers) answer.markdown.refresh();
  }

  // On a narrow screen settings and conversation take turns.
  #toggleMenu() {
    const isOpen = this.#section.toggleAttribute("data-menu");
    this.#menu.setAttribute("aria-expanded", String(isOpen));
    this.#menu.textContent = isOpen ? "Back to the conversation" : "Settings";
  }

  cancel() {
    for (const cancel of this.#cancels) cancel();
  }

  #escape() {
    if (this.#cancels.length) this.cancel();
    else if (this.#editing) this.#edit(null);
  }

  clear() {
    this.cancel();
    this.#turns = [];
    this.#id = crypto.randomUUID?.() ?? String(Math.random());
    this.#past.current = null;
    this.#edit(null);
    this.#setRunning(false);
    this.#greet();
    this.#prompt.focus();
  }

  #greet() {
    const examples = EXAMPLES.map(([name, text]) => h("button", { type: "button", class: "example", onclick: () => this.#try(text) },
      h("strong", null, name), h("span", null, text)));
    fill(this.#log, h("div", { class: "greeting" },
      h("h2", null, "Same answer, sooner"),
      h("p", null, "A proposer drafts tokens, the target model checks them all in one step. The text is what plain decoding would give; "
        + "“Tokens” shows who drafted what."),
      h("div", { class: "examples" }, examples)));
    this.#export.hidden = true;
    this.#context.hidden = true;
  }

  // An example is deterministic, so that everybody sees the same.
  #try(text) {
    this.#sampling.set({ temperature: 0 });
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
    if (this.#editing) this.#dropFrom(this.#editing);
    this.#edit(null);
    this.#prompt.value = "";
    this.#ask(question);
  }

  // What can be done with a turn, while no answer is being written.
  get #calls() {
    const idle = (does) => (turn) => this.#cancels.length || does(turn);
    return {
      edit: idle((turn) => this.#edit(turn)),
      remove: idle((turn) => this.#remove(turn)),
      regenerate: idle((turn) => {
        this.#dropFrom(turn);
        this.#ask(turn.question);
      }),
    };
  }

  // The question of a turn in the composer; sent, it replaces the turn and those after it.
  #edit(turn) {
    this.#editing = turn;
    this.#editNote.hidden = !turn;
    if (!turn) return;
    fill(this.#editNote, "Sending replaces this message and what follows it. ",
      h("button", { type: "button", class: "quiet small", onclick: () => { this.#prompt.value = ""; this.#edit(null); this.#prompt.focus(); } }, "Cancel editing"));
    this.#prompt.value = turn.question;
    this.#prompt.focus();
  }

  #dropFrom(turn) {
    const index = this.#turns.indexOf(turn);
    if (index < 0) return;
    for (const gone of this.#turns.splice(index)) gone.element.remove();
  }

  #remove(turn) {
    this.#turns.splice(this.#turns.indexOf(turn), 1);
    turn.element.remove();
    if (this.#editing === turn) this.#edit(null);
    this.#keep();
    if (!this.#turns.length) this.clear();
    this.#prompt.focus();
  }

  get #record() {
    const [first] = this.#turns;
    return { id: this.#id, title: first ? titleOf(first.question) : "", at: new Date().toISOString(), model: this.#choices.model?.id ?? null,
      system: this.#system.value.trim(), turns: this.#turns.map((turn) => turn.record) };
  }

  #keep() {
    this.#past.keep(this.#record);
    this.#past.current = this.#id;
  }

  #reopen({ id, system, turns }) {
    this.cancel();
    this.#edit(null);
    this.#id = id;
    this.#system.value = system ?? "";
    this.#systemBox.open = Boolean(system);
    this.#turns = [];
    this.#start();
    for (const { question, request, answers, verdict } of turns) {
      const turn = this.#begin(question, request);
      answers.forEach((kept, index) => {
        const answer = this.#answer(answers.length > 1 ? "AB"[index] : null, kept.title);
        turn.add(answer, request);
        answer.restore(kept);
      });
      turn.conclude(verdict ?? "");
    }
    this.#past.current = id;
    this.#setRunning(false);
    if (this.#section.hasAttribute("data-menu")) this.#toggleMenu();
    this.#follow();
    this.#prompt.focus();
  }

  #download(ending, type, text) {
    download(`conversation-${new Date().toISOString().slice(0, 10)}.${ending}`, type, text);
  }

  #start() {
    fill(this.#log);
    this.#export.hidden = false;
  }

  #begin(question, request) {
    const turn = new Turn(question, request, this.#calls);
    this.#turns.push(turn);
    this.#log.append(turn.element);
    return turn;
  }

  #answer(label, title) {
    return new Answer(this.#inspector, label, title, () => this.#isTextShown);
  }

  async #ask(question) {
    if (!this.#turns.length) this.#start();
    const turns = this.#turns;
    const isRace = this.#compare.checked;
    const pickers = isRace ? [this.#left, this.#right] : [this.#left];
    const body = this.#body(question);
    const turn = this.#begin(question, body);
    this.#setRunning(true);
    const sides = pickers.map((picker, index) => ({ picker, title: picker.title, label: isRace ? "AB"[index] : null }));
    const run = (side) => this.#run(side, body, turn);
    if (isRace && this.#order.value === "in turn") await inTurn(sides, run);
    else await Promise.all(sides.map(run));
    if (turns !== this.#turns) return;
    this.#setRunning(false);
    const verdict = turn.compare();
    const [answer] = turn.answers;
    announce(verdict || `Answer ${answer.state === "limit" ? "stopped at the token limit" : answer.state}, ${count(answer.tokens.ids.length)} tokens`);
    this.#measure(answer);
    this.#keep();
    this.#follow();
  }

  // One answer, from sending to its end.
  #run({ picker, title, label }, body, turn) {
    const answer = this.#answer(label, title);
    const request = { ...body };
    if (picker.request != null) request.speculation = picker.request;
    turn.add(answer, { ...request });
    this.#follow();
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
    const system = this.#system.value.trim();
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...this.#turns.flatMap((turn) => turn.messages), { role: "user", content: question }];
    return { model: this.#choices.model?.id, messages, ...this.#sampling.fields };
  }

  // How much of the context the conversation takes.
  #measure({ finish }) {
    const limit = this.#choices.model?.max_model_len;
    this.#context.hidden = !finish || !limit;
    if (this.#context.hidden) return;
    const used = finish.usage.prompt_tokens + finish.usage.completion_tokens;
    this.#meter.max = limit;
    this.#meter.high = 0.9 * limit;
    this.#meter.value = used;
    fill(this.#used, `${count(used)} of ${count(limit)} tokens`);
  }

  #setRunning(isRunning) {
    if (!isRunning) this.#cancels = [];
    const hadFocus = document.activeElement === this.#stop || document.activeElement === this.#send;
    this.#send.hidden = isRunning;
    this.#stop.hidden = !isRunning;
    this.#section.toggleAttribute("data-running", isRunning);
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
  for (const side of sides) if (!(await run(side)).hasEnded) break;
}
