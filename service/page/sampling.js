// The settings of a request: how tokens are drawn, where it ends, what it begins with.

import { h, field } from "./dom.js";

export class Sampling {
  numbers; // elements, in order
  ends;
  expects;
  #controls;
  #alternatives = h("input", { type: "checkbox", id: "alternatives" });

  constructor() {
    const numeric = (label, attributes) => {
      const input = h("input", { type: "number", step: "any", ...attributes });
      return { input, element: field(label, input), get value() { return input.value === "" ? null : Number(input.value); } };
    };
    const text = (label, hint) => {
      const input = h("textarea", { rows: 2 });
      return { input, element: field(label, input, hint), get value() { return input.value; } };
    };
    this.#controls = {
      temperature: numeric("Temperature", { min: 0, max: 2, step: 0.1, placeholder: "default" }),
      top_p: numeric("Top p", { min: 0, max: 1, step: 0.05, placeholder: "default" }),
      top_k: numeric("Top k", { min: 0, step: 1, placeholder: "default" }),
      min_p: numeric("Min p", { min: 0, max: 1, step: 0.01, placeholder: "default" }),
      max_tokens: numeric("Max tokens", { min: 1, step: 1, value: 512, placeholder: "what fits" }),
      seed: numeric("Seed", { step: 1, placeholder: "random" }),
      stop: text("Stop strings", "One a line; \\n stands for a line break."),
      prediction: text("Predicted answer", "Text you expect in the answer; draft tokens are taken from it."),
    };
    const elements = Object.values(this.#controls).map((one) => one.element);
    this.numbers = elements.slice(0, 6);
    this.ends = [elements[6], h("div", { class: "check" }, this.#alternatives, h("label", { for: "alternatives" }, "Alternatives of each token (slower)"))];
    this.expects = elements.slice(7);
  }

  // Shows values in the form.
  set(values) {
    for (const [name, value] of Object.entries(values)) this.#controls[name].input.value = value;
  }

  // Fields of a request, but messages and speculation.
  get fields() {
    const { seed, stop, prediction, ...rest } = Object.fromEntries(Object.entries(this.#controls).map(([name, one]) => [name, one.value]));
    const fields = { seed: seed ?? crypto.getRandomValues(new Uint32Array(1))[0] };
    for (const [name, value] of Object.entries(rest)) if (value != null) fields[name] = value;
    const stops = stop.split("\n").filter(Boolean).map((one) => one.replaceAll("\\n", "\n"));
    if (stops.length) fields.stop = stops;
    if (prediction.trim()) fields.prediction = { type: "content", content: prediction.trim() };
    if (this.#alternatives.checked) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
    return fields;
  }
}
