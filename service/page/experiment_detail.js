// One experiment: what it says, how it went, and what can be done about it.

import { h, chip, fill, table } from "./dom.js";
import { call, experimentPath } from "./api.js";
import { config, count, duration, figure, instant, percent } from "./format.js";
import { ArmsPlot, EffectPlot } from "./plot.js";

const UNITS = { tpot: "time per token", latency_per_token: "latency per token", ttft: "time to first token", tokens_per_second: "tokens per second" };

export class ExperimentDetail {
  element = h("article", { class: "experiment" });
  #calls;
  #parts = {};
  #plots = new Map();
  #seen = "";
  #actionsFor = "";
  #arms = new ArmsPlot("Requests counted in each arm");

  // `calls`: copy(definition), changed(), gone().
  constructor(calls) {
    this.#calls = calls;
    const part = (name, tag = "div", attributes = null) => (this.#parts[name] = h(tag, { class: name, ...attributes }));
    fill(this.element, part("heading", "header"), part("actions"), part("problem", "p", { role: "alert", hidden: true }),
      part("conclusion", "p", { role: "status" }), part("facts", "p"), part("remarks"), part("plots"), part("tables"));
  }

  update(experiment, points) {
    const seen = JSON.stringify([experiment, points.length]);
    if (seen === this.#seen) return;
    this.#seen = seen;
    const { definition, report } = experiment;
    this.element.setAttribute("aria-label", `Experiment ${definition.name}`);
    fill(this.#parts.heading, h("h1", null, definition.name), chip(experiment.status));
    this.#say(`${report.verdict}.`, report.decision);
    fill(this.#parts.facts, facts(experiment));
    fill(this.#parts.remarks, definition.hypothesis ? h("p", { class: "hypothesis" }, `“${definition.hypothesis}”`) : null,
      experiment.ended_because && experiment.ended_because !== report.verdict ? h("p", { class: "hint" }, `Ended because: ${experiment.ended_because}.`) : null,
      report.warnings.map((text) => h("p", { class: "warning" }, text)), promotion(experiment));
    this.#act(experiment);
    this.#draw(report, definition, points);
    fill(this.#parts.tables, armTable(report), report.guardrails.length ? guardrailTable(report) : null, split(report));
  }

  // A verdict is said once, not at every look.
  #say(text, decision) {
    if (this.#parts.conclusion.textContent !== text) this.#parts.conclusion.textContent = text;
    this.#parts.conclusion.dataset.decision = decision;
  }

  #draw(report, definition, points) {
    const names = report.comparisons.map((one) => `${one.arm} against ${one.against}`);
    for (const name of [...this.#plots.keys()]) if (!names.includes(name)) this.#plots.delete(name);
    const figures = report.comparisons.map((one, index) => {
      const name = names[index];
      if (!this.#plots.has(name)) {
        const signed = (value) => percent(value, { signed: true });
        this.#plots.set(name, new EffectPlot(`How much faster ${one.arm} is than ${one.against}, with its interval`, signed));
      }
      const saved = one.samples_saved > 0.005 ? ` Covariates save ${percent(one.samples_saved)} of the samples.` : "";
      return plotPanel(`How much faster ${one.arm} is than ${one.against}`, this.#plots.get(name),
        `Band: ${percent(1 - report.significance)} interval, valid at every look. Dashed: interval ${definition.adjust === false ? "adjusted by" : "without"} covariates.${saved}`);
    });
    const legend = h("ul", { class: "legend" }, report.arms.map((arm, index) =>
      h("li", null, h("span", { class: "swatch", "data-arm": index }), `${arm.name} ${count(arm.analysed)}`)));
    fill(this.#parts.plots, figures, plotPanel("Requests by arm", this.#arms, legend));
    report.comparisons.forEach((one, index) => this.#plots.get(names[index]).update(looks(points, one, definition.adjust !== false)));
    this.#arms.name(report.arms.map((arm) => arm.name));
    this.#arms.update(points.map((point) => ({ samples: point.num_samples, by_arm: point.by_arm })));
  }

  #act(experiment) {
    const { definition, report, status, ended_at: endedAt } = experiment;
    const key = JSON.stringify([definition, status, endedAt, report.is_safe_to_promote, report.best]);
    if (key === this.#actionsFor) return;
    this.#actionsFor = key;
    const name = definition.name;
    const isLive = status === "running" || (status === "promoted" && endedAt == null);
    const button = (text, action, attributes) => h("button", { type: "button", onclick: action, ...attributes }, text);
    const post = (verb, body) => () => this.#try(() => call("POST", experimentPath(name, verb), body));
    const actions = [];
    if (status === "draft") actions.push(button("Start", post("start"), { class: "primary" }));
    if (status === "running" || status === "stopped") actions.push(this.#promotion(definition, report));
    if (isLive) actions.push(button("Stop", confirmed(`Stop ${name}?`, "It cannot be continued; a copy can be started.", "Stop it", post("stop"))));
    actions.push(button("Copy", () => this.#calls.copy(definition), { class: "quiet" }));
    if (!isLive) {
      const remove = () => this.#try(() => call("DELETE", experimentPath(name)), this.#calls.gone);
      actions.push(button("Delete", confirmed(`Delete ${name}?`, "All it has seen is lost.", "Delete it", remove), { class: "quiet" }));
    }
    fill(this.#parts.actions, actions);
  }

  // The arm that the data support at a press; another one only by name, and after a warning.
  #promotion(definition, report) {
    const promote = (arm) => () => this.#try(() => call("POST", experimentPath(definition.name, "promote"), arm ? { arm } : {}));
    if (report.is_safe_to_promote) {
      return h("button", { type: "button", class: "primary", onclick: confirmed(`Promote ${report.best}?`,
        "Its config becomes the default of this service, watched for a cool-down.", `Promote ${report.best}`, promote(null)) }, `Promote ${report.best}`);
    }
    return h("button", { type: "button", onclick: () => choose(definition.arms.map((arm) => arm.name), (arm) => promote(arm)()) }, "Promote …");
  }

  async #try(action, then = this.#calls.changed) {
    this.#parts.problem.hidden = true;
    try {
      await action();
      await then();
    } catch (error) {
      this.#parts.problem.textContent = error.message;
      this.#parts.problem.hidden = false;
    }
  }
}

// Trace points as the plot wants them.
function looks(points, { arm, against }, isAdjusted) {
  return points.flatMap((point) => {
    const found = point.effects.find((one) => one.arm === arm && one.against === against);
    if (!found) return [];
    const [effect, other] = isAdjusted ? [found.adjusted, found.unadjusted] : [found.unadjusted, found.adjusted];
    return [{ samples: point.num_samples, effect, other }];
  });
}

function plotPanel(title, plot, note) {
  return h("section", { class: "panel", "aria-label": title }, h("h2", null, title), plot.element, h("div", { class: "hint" }, note));
}

function facts({ definition, report, started_at: startedAt, ended_at: endedAt }) {
  const said = [UNITS[report.metric], `${report.allocation} allocation by ${report.unit}`,
    `${count(report.num_samples)} of at least ${count(report.min_samples)}, at most ${count(report.max_samples)} requests`];
  if (definition.at_end?.action === "promote") said.push("promotes the winner");
  if (startedAt != null) said.push(`started ${instant(startedAt)}`);
  if (endedAt != null) said.push(`ended ${instant(endedAt)}`);
  return said.join(" · ");
}

function promotion({ promotion: made, definition }) {
  if (!made) return null;
  const arm = definition.arms[made.arm].name;
  const back = made.rolled_back_at != null ? ` Rolled back ${instant(made.rolled_back_at)}: ${made.reason}.` : "";
  return h("p", { class: "warning good" }, `${arm} was made the default (profile ${made.profile}) ${instant(made.at)}${made.by_hand ? ", by hand" : ""}.${back}`);
}

function armTable(report) {
  const most = Math.max(...report.arms.map((arm) => arm.analysed), 1);
  const rows = report.arms.map((arm, index) => {
    const bar = h("span", { class: "bar-fill", "data-arm": index });
    bar.style.width = `${(100 * arm.analysed) / most}%`;
    const tail = arm.quantiles.find((one) => one.metric === report.metric);
    const audited = arm.audited ? `${count(arm.diverged)} of ${count(arm.audited)}` : "–";
    return [arm.name, h("span", { class: "mono" }, config(arm.speculation)), percent(arm.weight),
      h("span", { class: "bar-cell" }, bar, h("span", null, count(arm.analysed))), inUnit(report.metric, arm.level),
      tail ? `${inUnit(report.metric, tail.p50)} / ${inUnit(report.metric, tail.p95)}` : "–", count(arm.failed), count(arm.aborted), audited];
  });
  return table("Arms", ["Arm", "Config", "Share", "Requests", "Mean", "p50 / p95", "Failed", "Left", "Diverged"], rows);
}

function guardrailTable(report) {
  return table("Guardrails", ["Arm", "Rule", "State", "Now", "Interval", "Limit"], report.guardrails.map((rail) => {
    const say = (value) => rail.unit === "relative" ? percent(value, { signed: true }) : figure(value);
    const now = rail.unit === "relative" ? say(rail.value) : `${say(rail.value)} ${rail.unit}`;
    return [rail.arm, rail.rule, chip(rail.state), now, rail.metric === "audit" ? "–" : `${say(rail.low)} to ${say(rail.high)}`, say(rail.limit)];
  }));
}

function split({ sample_ratio: ratio, arms }) {
  if (!ratio) return h("p", { class: "hint" }, "Time slots are assigned, so there is no split by chance to check.");
  const seen = ratio.observed.map((observed, arm) => `${arms[arm]?.name ?? arm + 1} ${count(observed)} of ${count(ratio.expected[arm])} expected`).join(", ");
  return h("p", { class: ratio.is_mismatch ? "warning" : "hint" },
    `The split of the traffic ${ratio.is_mismatch ? "does not match" : "matches"} the shares: ${seen} (p = ${figure(ratio.p_value)}).`);
}

function inUnit(metric, value) {
  return metric === "tokens_per_second" ? `${figure(value)} /s` : duration(value);
}

// Asks before doing.
function confirmed(question, consequence, yes, action) {
  return () => dialog(question, h("p", null, consequence), [[yes, action]]);
}

function choose(names, action) {
  dialog("Promote which arm?", h("p", null, "The data do not support one yet. Whichever you name becomes the default."), names.map((name) => [name, () => action(name)]));
}

function dialog(title, text, answers) {
  const box = h("dialog", { "aria-labelledby": "dialog-title", onclose: () => box.remove() }, h("h2", { id: "dialog-title" }, title), text,
    h("div", { class: "dialog-row" },
      h("button", { type: "button", onclick: () => box.close() }, "Cancel"),
      answers.map(([name, action]) => h("button", { type: "button", class: "primary", onclick: () => { box.close(); action(); } }, name))));
  document.body.append(box);
  box.showModal();
}
