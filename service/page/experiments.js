// All experiments, newest first, and the one that is looked at.

import { h, chip, fill } from "./dom.js";
import { call, experimentPath, Poll } from "./api.js";
import { ExperimentDetail } from "./experiment_detail.js";
import { ExperimentForm } from "./experiment_form.js";

const SECONDS = 2;

export class ExperimentsScreen {
  #section;
  #choices;
  #name = ""; // of the one shown
  #detail = null;
  #problem = h("p", { class: "problem", role: "alert", hidden: true });
  #seen = "";
  #list = h("ul", { class: "experiment-list" });
  #place = h("div", { class: "experiment-place" });
  #poll = new Poll(() => this.#look(), () => !this.#section.hidden, SECONDS);

  constructor(section, choices) {
    this.#section = section;
    this.#choices = choices;
    fill(section,
      h("aside", { class: "experiments-side", "aria-label": "All experiments" },
        h("button", { class: "primary", type: "button", onclick: () => this.#create() }, "New experiment"), this.#list),
      h("div", null, this.#problem, this.#place));
  }

  // The view is in sight; `name` is the experiment in the address, or nothing.
  shown(name) {
    this.#select(name);
    this.#poll.start();
  }

  #select(name) {
    if (name === this.#name) return;
    this.#name = name;
    this.#detail = name ? new ExperimentDetail({
      copy: (definition) => this.#create(definition),
      changed: () => this.#poll.now(),
      gone: () => location.replace("#experiments"),
    }) : null;
    fill(this.#place, this.#detail?.element);
    this.#poll.now();
  }

  async #look() {
    const name = this.#name;
    try {
      const { data } = await call("GET", "v1/experiments");
      this.#show(data);
      if (name) {
        const [experiment, trace] = await Promise.all([call("GET", experimentPath(name)), call("GET", experimentPath(name, "trace"))]);
        if (name === this.#name) this.#detail.update(experiment, trace.points);
      }
      this.#problem.hidden = true;
    } catch (error) {
      if (name !== this.#name) return;
      if (error.status === 404) fill(this.#place);
      fill(this.#problem, error.message);
      this.#problem.hidden = false;
    }
  }

  #show(experiments) {
    if (!this.#name && experiments.length) location.replace(addressOf(experiments[0].definition.name));
    if (!this.#name && !experiments.length) fill(this.#place, welcome());
    const seen = JSON.stringify([this.#name, experiments.map((one) => [one.definition.name, one.status])]);
    if (seen === this.#seen) return;
    this.#seen = seen;
    const focused = document.activeElement?.closest?.(".experiment-list a")?.hash;
    fill(this.#list, experiments.map(({ definition, status }) => {
      return h("li", null, h("a", { href: addressOf(definition.name), "aria-current": definition.name === this.#name ? "true" : null },
        h("span", null, definition.name), chip(status)));
    }));
    if (focused) [...this.#list.querySelectorAll("a")].find((link) => link.hash === focused)?.focus();
  }

  async #create(definition) {
    await this.#choices.load().catch(() => {});
    const form = new ExperimentForm(this.#choices, definition, (made) => (location.hash = addressOf(made.definition.name)));
    this.#section.append(form.element);
    form.open();
  }
}

function addressOf(name) {
  return `#experiments/${encodeURIComponent(name)}`;
}

function welcome() {
  return h("div", { class: "greeting" },
    h("h1", null, "Find out what is fastest on your traffic"),
    h("p", null, "An experiment splits live requests between speculation configs. The answers stay the same, so it compares time alone, "
      + "and you may look as often as you like: the intervals hold at every look."));
}
