// Defining an experiment. The service checks it; what it says is shown beside the field it is about.

import { h, field, fill, select } from "./dom.js";
import { call } from "./api.js";
import { SpeculationPicker } from "./speculation.js";

const METRICS = [["tpot", "time per token"], ["latency_per_token", "latency per output token"], ["ttft", "time to first token"], ["tokens_per_second", "output tokens per second"]];
const MAX_ARMS = 8;

export class ExperimentForm {
  element;
  #choices;
  #made;
  #arms = [];
  #guardrails = [];
  #rest; // of a copied definition: fields this form does not show
  #inputs;
  #armList = h("div", { class: "rows" });
  #guardrailList = h("div", { class: "rows" });
  #problem = h("p", { class: "problem", role: "alert", hidden: true });
  #foot = h("div", null, this.#problem); // where it is said if it is about no field
  #draft = h("input", { type: "checkbox", id: "as-draft" });
  #more = h("details", { class: "more" }, h("summary", null, "More: arms, allocation, sample sizes, filters, guardrails"));

  // `definition`, if given, is what the form begins with; `made` is called with the experiment that was created.
  constructor(choices, definition, made) {
    this.#choices = choices;
    this.#made = made;
    const from = definition ?? {};
    const input = (name, attributes) => h("input", { name, autocomplete: "off", ...attributes });
    const value = (name, fallback = null) => from[name] ?? fallback;
    this.#inputs = {
      name: input("name", { required: true, value: definition ? `${from.name}-2`.slice(0, 64) : null, placeholder: "lookup-on-rag" }),
      hypothesis: input("hypothesis", { value: value("hypothesis"), placeholder: "Prompt lookup is faster on quoted prompts" }),
      metric: select(METRICS, { name: "metric" }),
      unit: input("unit", { value: value("unit", "request") }),
      allocation: select([["fixed"], ["adaptive"], ["switchback"]], { name: "allocation" }),
      at_end: select([["report", "report only"], ["promote", "promote the winner"]], { name: "at_end" }),
      min_samples: input("min_samples", { type: "number", value: value("min_samples"), placeholder: "200" }),
      max_samples: input("max_samples", { type: "number", value: value("max_samples"), placeholder: "20000" }),
      significance: input("significance", { type: "number", step: "any", value: value("significance"), placeholder: "0.05" }),
      min_prompt_tokens: input("filter.min_prompt_tokens", { type: "number", min: 0, value: from.filter?.min_prompt_tokens }),
      max_prompt_tokens: input("filter.max_prompt_tokens", { type: "number", min: 0, value: from.filter?.max_prompt_tokens }),
    };
    this.#inputs.metric.value = value("metric", "tpot");
    this.#inputs.allocation.value = from.allocation?.kind ?? "fixed";
    this.#inputs.at_end.value = from.at_end?.action ?? "report";
    this.#rest = from;
    for (const arm of from.arms ?? [{ speculation: { method: "none" } }, { speculation: { method: "ngram" } }]) this.#addArm(arm);
    for (const guardrail of from.guardrails ?? []) this.#addGuardrail(guardrail);
    this.element = h("dialog", { class: "experiment-form", "aria-labelledby": "form-title", onclose: () => this.element.remove() }, this.#layout());
  }

  open() {
    this.element.showModal();
    this.#inputs.name.focus();
  }

  #layout() {
    const i = this.#inputs;
    const add = (text, action) => h("button", { type: "button", class: "quiet", onclick: action }, text);
    const [baseline, candidate] = this.#arms;
    this.#more.open = this.#arms.length > 2 || this.#guardrails.length > 0;
    this.#more.append(
      h("div", { class: "grid" }, field("Hypothesis", i.hypothesis), field("Allocation", i.allocation), field("Unit", i.unit, "request, user or header:NAME"),
        field("Min requests", i.min_samples), field("Max requests", i.max_samples), field("Significance", i.significance),
        field("Min prompt tokens", i.min_prompt_tokens), field("Max prompt tokens", i.max_prompt_tokens)),
      h("fieldset", { "data-param": "arms" }, h("legend", null, "Arms"), h("p", { class: "hint" }, "Each is compared with the baseline."),
        this.#armList, add("Add an arm", () => this.#addArm({}))),
      h("fieldset", { "data-param": "guardrails" }, h("legend", null, "Guardrails"), this.#guardrailList, add("Add a guardrail", () => this.#addGuardrail({}))),
      h("div", { class: "check" }, this.#draft, h("label", { for: "as-draft" }, "Save as a draft, start later")));
    return h("form", { onsubmit: (event) => this.#submit(event), novalidate: true },
      h("h2", { id: "form-title" }, "New experiment"),
      h("div", { class: "grid" }, field("Name", i.name), baseline.picker.element, candidate.picker.element, field("Metric", i.metric), field("At the end", i.at_end)),
      this.#more, this.#foot,
      h("div", { class: "dialog-row" }, h("span", { class: "spring" }),
        h("button", { type: "button", onclick: () => this.element.close() }, "Cancel"), h("button", { class: "primary" }, "Create")));
  }

  #addArm(from) {
    if (this.#arms.length >= MAX_ARMS) return;
    const number = this.#arms.length;
    const arm = {
      name: h("input", { autocomplete: "off", value: from.name, placeholder: "name of its config" }),
      picker: new SpeculationPicker(this.#choices, ["Baseline", "Candidate"][number] ?? "Config", { allowsDefault: false }),
      weight: h("input", { type: "number", min: 0, max: 1, step: "any", placeholder: "equal", value: from.weight }),
    };
    if (from.profile) arm.picker.choose(`profile:${from.profile}`);
    else if (from.speculation && Object.keys(from.speculation).length > 1) arm.picker.edit(from.speculation);
    else if (from.speculation) arm.picker.choose(from.speculation.method);
    this.#arms.push(arm);
    // The first two configs stand in the short form.
    const [name, share] = number < 2 ? [`Name of the ${["baseline", "candidate"][number]}`, "Share"] : ["Name", "Share"];
    const fields = [field(name, arm.name), ...(number < 2 ? [] : [arm.picker.element]), field(share, arm.weight)];
    this.#addRow(this.#armList, this.#arms, arm, fields, "arm", number >= 2);
  }

  #addGuardrail(from) {
    const rail = {
      metric: select([...METRICS, ["error_rate", "error rate"]]),
      worsening: h("input", { type: "number", min: 0, step: "any", placeholder: "0.2", value: from.max_worsening }),
      limit: h("input", { type: "number", min: 0, step: "any", value: from.limit }),
    };
    rail.metric.value = from.metric ?? "ttft";
    this.#guardrails.push(rail);
    const fields = [field("Metric (p95)", rail.metric), field("Max worsening", rail.worsening, "0.2 allows 20 %"), field("Limit", rail.limit, "s, /s or share")];
    this.#addRow(this.#guardrailList, this.#guardrails, rail, fields, "guardrail");
  }

  #addRow(list, all, one, fields, what, isRemovable = true) {
    const row = h("div", { class: "row", role: "group", "aria-label": what }, fields,
      isRemovable && h("button", { type: "button", class: "quiet remove", "aria-label": `Remove this ${what}`, onclick: () => {
        all.splice(all.indexOf(one), 1);
        row.remove();
      } }, "✕"));
    one.row = row;
    list.append(row);
  }

  get #definition() {
    const i = this.#inputs;
    const numeric = (input) => (input.value === "" ? undefined : Number(input.value));
    const tokens = { min_prompt_tokens: numeric(i.min_prompt_tokens), max_prompt_tokens: numeric(i.max_prompt_tokens) };
    return {
      ...this.#rest,
      name: i.name.value.trim(),
      hypothesis: i.hypothesis.value.trim(),
      arms: this.#armDefinitions.map((arm, index) => ({ ...arm, weight: numeric(this.#arms[index].weight) })),
      metric: i.metric.value,
      unit: i.unit.value.trim(),
      allocation: this.#rest.allocation?.kind === i.allocation.value ? this.#rest.allocation : { kind: i.allocation.value },
      at_end: this.#rest.at_end?.action === i.at_end.value ? this.#rest.at_end : { action: i.at_end.value },
      min_samples: numeric(i.min_samples),
      max_samples: numeric(i.max_samples),
      significance: numeric(i.significance),
      filter: { ...this.#rest.filter, ...tokens },
      guardrails: this.#guardrails.map((rail) => ({ metric: rail.metric.value, max_worsening: numeric(rail.worsening), limit: numeric(rail.limit) })),
    };
  }

  // An arm without a name has that of its profile or method, with a number where another one has it too.
  get #armDefinitions() {
    const taken = new Set(this.#arms.map((arm) => arm.name.value.trim()));
    return this.#arms.map(({ name, picker }) => {
      const config = picker.value;
      const wanted = config.profile ?? config.speculation.method;
      let own = name.value.trim() || wanted;
      for (let number = 2; !name.value.trim() && taken.has(own); number += 1) own = `${wanted}-${number}`;
      taken.add(own);
      return { name: own, ...config };
    });
  }

  async #submit(event) {
    event.preventDefault();
    for (const marked of this.element.querySelectorAll("[aria-invalid]")) marked.removeAttribute("aria-invalid");
    try {
      const made = await call("POST", `v1/experiments?draft=${this.#draft.checked}`, this.#definition);
      this.element.close();
      this.#made(made);
    } catch (error) {
      fill(this.#problem, error.message);
      this.#problem.hidden = false;
      const wrong = this.#inputOf(error.param ?? "");
      if (wrong && this.#more.contains(wrong)) this.#more.open = true;
      (wrong?.closest(".field") ?? this.#foot).append(this.#problem);
      wrong?.setAttribute("aria-invalid", "true");
      wrong?.focus();
    }
  }

  // The control that an error is about: name, arms[1].name, guardrails[0].metric, filter.min_prompt_tokens, …
  #inputOf(param) {
    const [, list, index] = /^(arms|guardrails)\[(\d+)\]/.exec(param) ?? [];
    if (list) {
      const one = { arms: this.#arms, guardrails: this.#guardrails }[list][Number(index)];
      return one?.[param.split(".")[1]] ?? (one?.picker?.element ?? one?.row)?.querySelector("select, input");
    }
    return this.element.querySelector(`[name="${CSS.escape(param)}"]`) ?? this.element.querySelector(`[data-param="${CSS.escape(param)}"] input`);
  }
}
