// Choosing a speculation config: a profile, a method with its defaults, or a method with parameters.

import { h, field, fill } from "./dom.js";
import { call } from "./api.js";
import { config, words } from "./format.js";

// What the service has, and what a config of each method may hold.
export class Choices {
  model = null; // what /v1/models says of it
  profiles = [];
  methods = [];
  fallback = null; // name of the default profile; null is the engine's own config
  #schema = null;

  async load() {
    const [overview, schema] = await Promise.all([call("GET", "v1/speculation"), this.#schema ?? call("GET", "page/speculation.json")]);
    this.#schema = schema;
    this.profiles = overview.profiles;
    this.methods = overview.methods;
    this.fallback = overview.default;
    return this;
  }

  // Names and descriptions of a method's parameters.
  parameters(method) {
    const definition = this.#definition(method);
    return Object.entries(definition.properties).filter(([name]) => name !== "method");
  }

  describe(method) {
    return this.#definition(method).description;
  }

  // Methods that the service can run, as configs name them: with the combinations, which every service has.
  get configurable() {
    const combinations = Object.keys(this.#schema.discriminator.mapping).filter((name) => ["none", "auto", "first"].includes(name));
    return [...new Set(["none", "auto", ...this.methods, ...combinations])];
  }

  // Methods that guess by themselves: those that tokens can come from.
  get sources() {
    return this.methods.filter((name) => !["none", "auto", "first"].includes(name));
  }

  #definition(method) {
    return this.#schema.$defs[this.#schema.discriminator.mapping[method].split("/").at(-1)];
  }
}

export class SpeculationPicker {
  element;
  #choices;
  #select = h("select");
  #method = h("select", { "aria-label": "Method" });
  #parameters = h("div", { class: "parameters" });
  #inputs = new Map();
  #allowsDefault;

  // `allowsDefault`: whether it may be left to the service.
  constructor(choices, label, { allowsDefault = true, value = allowsDefault ? "" : "none" } = {}) {
    this.#choices = choices;
    this.#allowsDefault = allowsDefault;
    this.element = h("div", { class: "picker" }, field(label, this.#select), this.#parameters);
    this.#select.addEventListener("change", () => this.#adapt());
    this.#method.addEventListener("change", () => this.#adapt());
    this.refresh(value);
  }

  // Offers what there is now, and keeps what is chosen.
  refresh(value = this.#select.value) {
    const { profiles, configurable } = this.#choices;
    const groups = [];
    if (this.#allowsDefault) groups.push(h("option", { value: "" }, "service default"));
    if (profiles.length) groups.push(h("optgroup", { label: "Profiles" }, profiles.map(({ name }) => h("option", { value: `profile:${name}` }, name))));
    groups.push(h("optgroup", { label: "Methods" }, configurable.filter((name) => name !== "first")
      .map((name) => h("option", { value: name }, words(name)))));
    groups.push(h("option", { value: "custom" }, "with parameters …"));
    fill(this.#select, groups);
    const method = this.#method.value;
    fill(this.#method, configurable.map((name) => h("option", { value: name }, words(name))));
    this.#method.value = method || "ngram";
    this.choose(value);
  }

  choose(value) {
    this.#select.value = value;
    if (this.#select.selectedIndex < 0) this.#select.selectedIndex = 0;
    this.#adapt();
  }

  // Shows a config with its parameters.
  edit(config) {
    this.#method.value = config.method;
    this.choose("custom");
    for (const [name, input] of this.#inputs) {
      const value = config[name];
      if (value !== undefined) input.value = Array.isArray(value) ? JSON.stringify(value) : value;
    }
  }

  // Null for the service's default, else {profile} or {speculation}.
  get value() {
    const chosen = this.#select.value;
    if (!chosen) return null;
    if (chosen.startsWith("profile:")) return { profile: chosen.slice("profile:".length) };
    if (chosen !== "custom") return { speculation: { method: chosen } };
    const given = [...this.#inputs].filter(([, input]) => input.value.trim() !== "");
    return { speculation: { method: this.#method.value, ...Object.fromEntries(given.map(([name, input]) => [name, parsed(name, input.value.trim())])) } };
  }

  // What a generation request has in its field `speculation`.
  get request() {
    const value = this.value;
    return value && (value.profile ?? value.speculation);
  }

  get title() {
    const value = this.value;
    if (!value) return this.#choices.fallback ?? "service default";
    return value.profile ?? config(value.speculation);
  }

  #adapt() {
    this.#inputs.clear();
    if (this.#select.value !== "custom") return void fill(this.#parameters);
    const method = this.#method.value;
    const fields = this.#choices.parameters(method).map(([name, schema]) => {
      const input = h("input", { placeholder: placeholder(schema), autocomplete: "off", spellcheck: "false" });
      this.#inputs.set(name, input);
      return field(words(name), input, range(schema));
    });
    fill(this.#parameters, field("method", this.#method), h("p", { class: "hint" }, this.#choices.describe(method)), fields);
  }
}

// A list of proposers is written as their names, in order, or as JSON. What makes no sense is left to the service to say.
function parsed(name, text) {
  if (name === "proposers" && !text.startsWith("[")) return text.split(",").map((method) => ({ method: method.trim() }));
  if (name === "proposers") {
    try {
      return JSON.parse(text);
    } catch {
      return text;
    }
  }
  return Number.isNaN(Number(text)) ? text : Number(text);
}

function placeholder(schema) {
  return schema.type === "array" ? "suffix, ngram" : String(schema.default ?? "");
}

function range(schema) {
  const alternatives = schema.anyOf ?? [schema];
  return alternatives.map((one) => {
    if (one.enum) return one.enum.join(", ");
    if (one.type === "array") return "methods, in order";
    const low = one.minimum ?? one.exclusiveMinimum;
    return low === undefined ? "" : `${low} to ${one.maximum}`;
  }).filter(Boolean).join(", or ");
}
