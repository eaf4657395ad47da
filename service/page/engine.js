// The engine at work: the newest numbers, and the last two minutes of those that move.

import { h, chip, fill, table } from "./dom.js";
import { call, Poll } from "./api.js";
import { count, duration, figure, number, percent, words } from "./format.js";
import { bars, sparkline } from "./plot.js";
import { named } from "./token_text.js";

const SECONDS = 1;
const SLOTS = 120;
const SHOWN_REQUESTS = 15;

export class EngineScreen {
  #section;
  #body = h("div");
  #looks = []; // {at, view}, oldest first
  #poll = new Poll(() => this.#look(), () => !this.#section.hidden, SECONDS);

  constructor(section) {
    this.#section = section;
    fill(section, h("h1", { class: "unseen" }, "Engine"), this.#body);
  }

  shown() {
    this.#poll.start();
  }

  async #look() {
    let view;
    try {
      const [engine, engines, audit, cache] = await Promise.all(["v1/engine", "v1/engines", "v1/audit", "v1/cache"].map((path) => call("GET", path)));
      view = { ...engine, engines: engines.data, audit, tenants: cache.tenants };
    } catch (error) {
      fill(this.#body, h("p", { class: "empty", role: "alert" }, error.message));
      return;
    }
    const last = this.#looks.at(-1)?.view.stats;
    // A new service counts from zero.
    if (last && !(view.stats?.step_seconds_sum >= last.step_seconds_sum)) this.#looks = [];
    this.#looks = [...this.#looks, { at: performance.now() / 1000, view }].slice(-SLOTS - 1);
    const focusable = () => [...this.#body.querySelectorAll("a, [tabindex]")];
    const focused = focusable().indexOf(document.activeElement);
    fill(this.#body, view.model ? this.#draw(view) : h("p", { class: "empty" }, "The model is being loaded."));
    focusable()[focused]?.focus({ preventScroll: true });
  }

  #draw(view) {
    const { model, stats } = view;
    const head = h("header", { class: "engine-head" }, h("h2", null, model.name), h("p", null,
      `${model.description} · context ${count(model.context_length)} tokens · ${count(model.num_blocks)} blocks of ${model.block_size}`
      + (view.engines.length > 1 ? ` · ${view.engines.length} engines like this` : "") + " · ", h("a", { href: "metrics" }, "metrics for Prometheus")));
    if (!stats) return [head, h("p", { class: "empty" }, "No requests yet. Ask something in the playground.")];
    return [head, h("div", { class: "tiles" }, this.#liveTiles(view), blocksTile(stats), prefixTile(stats), savedTile(stats), auditTile(view.audit)),
      h("div", { class: "tiles wide" }, positionTile(stats), stepTile(view), skippedTile(stats), proposerTile(stats)),
      h("div", { class: "tables" }, engineTable(view.engines), tenantTable(view.tenants), requestTable(view.requests))];
  }

  #liveTiles({ model, num_live: live, stats }) {
    const series = (of) => this.#looks.map(({ view }) => view.stats && of(view.stats));
    const rates = this.#rates((counters) => counters.output_tokens ?? 0);
    return [
      liveTile("Batch", count(stats.num_running), `of ${count(model.max_running)} sequences`, series((one) => one.num_running), model.max_running > 16 ? 4 : model.max_running),
      liveTile("Queue", count(stats.num_waiting), `waiting · ${count(live)} in total`, series((one) => one.num_waiting), 4),
      liveTile("Output", figure(rates.at(-1)), "tokens / s", rates, 1),
      liveTile("Step time", duration(this.#recentStep()), "latest average", this.#steps(), 0),
    ];
  }

  // What a counter gained, a second, between looks.
  #rates(of) {
    return this.#looks.slice(1).map(({ at, view }, index) => {
      const before = this.#looks[index];
      if (!view.stats || !before.view.stats) return null;
      return (of(view.stats.counters) - of(before.view.stats.counters)) / (at - before.at);
    });
  }

  // Mean duration of the steps between two looks; null where none was made.
  #steps() {
    return this.#looks.slice(1).map(({ view }, index) => meanStep(this.#looks[index].view.stats, view.stats));
  }

  #recentStep() {
    return this.#steps().findLast((seconds) => seconds != null) ?? meanStep(null, this.#looks.at(-1).view.stats);
  }
}

function meanStep(before, after) {
  const steps = (after?.counters.steps ?? 0) - (before?.counters.steps ?? 0);
  return steps > 0 ? (after.step_seconds_sum - (before?.step_seconds_sum ?? 0)) / steps : null;
}

function tile(title, ...content) {
  return h("section", { class: "tile", "aria-label": title }, h("h3", null, title), content);
}

function liveTile(title, value, text, series, high) {
  return tile(title, h("p", { class: "big" }, value, h("small", null, text)), series.length > 2 ? sparkline(series, { high, slots: Math.min(SLOTS, Math.max(series.length, 20)) }) : null);
}

function blocksTile(stats) {
  const states = [["in use", stats.blocks_in_use], ["cached", stats.blocks_cached], ["free", stats.blocks_free]];
  const all = states.reduce((sum, [, blocks]) => sum + blocks, 0) || 1;
  const parts = states.map(([state, blocks]) => {
    const part = h("span", { class: "stack-part", "data-state": state });
    part.style.width = `${(100 * blocks) / all}%`;
    return part;
  });
  return tile("KV blocks", h("p", { class: "big" }, percent(stats.blocks_in_use / all), h("small", null, "in use")),
    h("div", { class: "stack", "aria-hidden": "true" }, parts),
    h("ul", { class: "legend" }, states.map(([state, blocks]) =>
      h("li", null, h("span", { class: "swatch", "data-state": state }), `${state} ${count(blocks)}`))));
}

function prefixTile({ counters }) {
  const cached = counters.cached_tokens ?? 0;
  const all = cached + (counters.prompt_tokens ?? 0);
  return tile("Prefix hit rate", h("p", { class: "big" }, all ? percent(cached / all) : "–", h("small", null, "of prompt tokens")),
    h("p", { class: "hint" }, `${count(cached)} of ${count(all)} came from the cache`));
}

function savedTile({ counters }) {
  const own = counters.output_tokens ? percent((counters.accepted_tokens ?? 0) / counters.output_tokens) : "–";
  return tile("Time saved", h("p", { class: "big" }, duration((counters.saved_seconds ?? 0) - (counters.lost_seconds ?? 0)), h("small", null, "of decoding")),
    h("p", { class: "hint" }, `${own} of ${count(counters.output_tokens ?? 0)} output tokens are accepted draft tokens`));
}

// Whether answers are those of plain decoding: some are run again to see.
function auditTile({ audited, diverged, share, divergences }) {
  const last = divergences.at(-1);
  return tile("Exactness audit", h("p", { class: `big${diverged ? " bad" : ""}` }, count(diverged), h("small", null, `of ${count(audited)} differ`)),
    h("p", { class: "hint" }, last ? `last: ${last.method}, token ${last.position + 1} of ${last.generation}`
      : share ? `${percent(share)} of answers with speculation are run again without it` : "off"));
}

function positionTile(stats) {
  const rows = stats.drafted_per_position.map((drafted, index) => {
    const share = drafted ? stats.accepted_per_position[index] / drafted : 0;
    return [String(index + 1), share, `${percent(share)} of ${count(drafted)}`];
  });
  return tile("Acceptance by position", rows.length ? bars("Accepted, by place in the draft", rows.slice(0, 12)) : nothing("No draft yet."));
}

function stepTile({ stats, step_seconds_bounds: bounds }) {
  const steps = stats.counters.steps ?? 0;
  const upTo = [...stats.step_seconds_buckets, steps];
  const counts = upTo.map((total, index) => total - (upTo[index - 1] ?? 0));
  const most = Math.max(...counts, 1);
  const rows = counts.map((times, index) => [
    index < bounds.length ? `≤ ${duration(bounds[index])}` : `> ${duration(bounds.at(-1))}`, times / most, count(times)]);
  const used = counts.map((times, index) => times ? index : -1).filter((index) => index >= 0);
  return tile("Step time distribution", h("p", { class: "hint" }, `${count(steps)} steps, mean ${duration(meanStep(null, stats))}`),
    used.length ? bars("Steps, by how long they took", rows.slice(Math.max(used[0] - 1, 0), used.at(-1) + 2)) : nothing("No step yet."));
}

function skippedTile(stats) {
  const reasons = Object.entries(stats.skipped_drafts).sort(([, a], [, b]) => b - a);
  const most = Math.max(...reasons.map(([, times]) => times), 1);
  return tile("Steps without a draft", reasons.length
    ? bars("By reason", reasons.map(([reason, times]) => [words(reason), times / most, count(times)])) : nothing("Every step had one."));
}

function proposerTile({ counters }) {
  const methods = Object.keys(counters).filter((key) => key.startsWith("drafts:")).map((key) => key.slice("drafts:".length));
  const rows = methods.map((method) => {
    const [drafts, tokens, accepted] = ["drafts", "draft_tokens", "accepted_tokens"].map((name) => counters[`${name}:${method}`] ?? 0);
    return [h("span", null, h("span", { class: "swatch", "data-source": method }), named(method)), count(drafts),
      tokens ? percent(accepted / tokens) : "–", drafts ? number(1 + accepted / drafts, 2) : "–"];
  });
  return tile("Proposers",
    rows.length ? table("Drafts of each", ["Proposer", "Drafts", "Acceptance rate", "Mean length"], rows) : nothing("No draft yet."));
}

function engineTable(engines) {
  return h("section", { class: "tile" }, table("Engines", ["Engine", "Where", "State", "Batch", "Queue", "Blocks in use", "Tokens / s", "Restarts"],
    engines.map((one) => [one.id, one.address, chip(one.state), count(one.running), count(one.waiting), count(one.blocks_in_use),
      figure(one.decode_tokens_per_second), count(one.deaths)])));
}

function tenantTable(tenants) {
  if (!tenants.length) return null;
  return h("section", { class: "tile" }, table("Tenants", ["Tenant", "Requests", "Prompt tokens", "From cache", "Hit rate"],
    [...tenants].reverse().map((one) => [one.tenant || "(no tenant)", count(one.requests), count(one.prompt_tokens), count(one.cached_tokens), percent(one.hit_rate)])));
}

function requestTable(requests) {
  if (!requests.length) return null;
  return h("section", { class: "tile" }, table("Last requests", ["Ended", "Request", "Tenant", "Speculation", "Prompt", "Cached", "Output", "First token", "Total", "Acceptance length"],
    requests.slice(0, SHOWN_REQUESTS).map((one) => [new Date(1000 * one.ended_at).toLocaleTimeString(), h("span", { class: "mono" }, one.id.slice(0, 14)), one.tenant || "–",
      one.experiment ? `${words(one.method)} (${one.experiment}, arm ${one.arm})` : words(one.method), count(one.prompt_tokens), count(one.cached_tokens),
      `${count(one.completion_tokens)}${one.is_aborted ? ", cancelled" : ""}`, duration(one.ttft), duration(one.end_to_end), number(one.mean_acceptance_length, 2)])));
}

function nothing(text) {
  return h("p", { class: "hint" }, text);
}
