// Drawings, as SVG of our own: a difference and its interval, curves over samples, a sparkline, bars.

import { h, announce, svg, fill } from "./dom.js";
import { count } from "./format.js";

const MARGIN = { top: 14, right: 16, bottom: 30, left: 60 };

// Round numbers inside a range, about `wanted` of them.
export function ticks(low, high, wanted) {
  const raw = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5, 10].find((one) => one * power >= raw) ?? 10);
  const first = Math.ceil(low / step - 1e-9) * step;
  return Array.from({ length: Math.floor((high - first) / step + 1e-9) + 1 }, (_, i) => first + i * step);
}

// A plot over samples that fits its place and can be read point by point, by pointer or by arrow keys.
class SamplePlot {
  element;
  #height;
  #drawing;
  #reading = h("p", { class: "reading" });
  #points = [];
  #marker = null;
  #width = 0;

  constructor(label, height) {
    this.#height = height;
    this.#drawing = svg("svg", { role: "img", tabindex: 0, "aria-label": label, height });
    this.element = h("figure", { class: "plot" }, this.#drawing, this.#reading);
    this.#drawing.addEventListener("pointermove", (event) => this.#point(this.#nearest(event.offsetX)));
    this.#drawing.addEventListener("pointerleave", () => this.#point(null));
    this.#drawing.addEventListener("blur", () => this.#point(null));
    this.#drawing.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.#draw()).observe(this.element);
  }

  // New points: each has `samples`, and what the kind of plot needs.
  update(points) {
    const wasAt = this.#marker;
    this.#points = points;
    this.#draw({ always: true });
    if (wasAt !== null) this.#point(Math.min(wasAt, points.length - 1));
  }

  #draw({ always = false } = {}) {
    const width = Math.round(this.element.clientWidth);
    if (!width || (!always && width === this.#width)) return;
    this.#width = width;
    this.#drawing.setAttribute("viewBox", `0 0 ${width} ${this.#height}`);
    if (this.#points.length < 2) {
      fill(this.#drawing, svg("text", { x: width / 2, y: this.#height / 2, "text-anchor": "middle", class: "tick" }, "Not enough requests to draw yet"));
      return;
    }
    const last = Math.max(this.#points.at(-1).samples, 1);
    this.x = (samples) => MARGIN.left + (samples / last) * (width - MARGIN.left - MARGIN.right);
    const [low, high] = this.range(this.#points);
    const drop = this.#height - MARGIN.top - MARGIN.bottom;
    this.y = (value) => MARGIN.top + ((high - Math.min(Math.max(value, low), high)) / (high - low)) * drop;
    const [left, right, bottom] = [MARGIN.left, width - MARGIN.right, this.#height - MARGIN.bottom];
    fill(this.#drawing,
      ticks(low, high, 4).map((value) => [
        svg("line", { class: Math.abs(value) < 1e-9 ? "zero" : "grid", x1: left, x2: right, y1: this.y(value), y2: this.y(value) }),
        svg("text", { class: "tick", x: left - 8, y: this.y(value) + 4, "text-anchor": "end" }, this.tick(value)),
      ]).flat(),
      ticks(0, last, width / 130).filter((value) => Number.isInteger(value)).map((value) =>
        svg("text", { class: "tick", x: this.x(value), y: bottom + 18, "text-anchor": "middle" }, count(value))),
      this.curves(this.#points),
      svg("line", { class: "marker", y1: MARGIN.top, y2: bottom, visibility: "hidden" }));
    this.#point(null);
  }

  #nearest(pixel) {
    if (!this.x || this.#points.length < 2) return null;
    const distances = this.#points.map((point) => Math.abs(this.x(point.samples) - pixel));
    return distances.indexOf(Math.min(...distances));
  }

  #key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || this.#points.length < 2) return;
    event.preventDefault();
    const here = this.#marker ?? (step > 0 ? -1 : this.#points.length);
    this.#point(Math.min(Math.max(here + step, 0), this.#points.length - 1));
    announce(this.#reading.textContent);
  }

  #point(index) {
    this.#marker = index;
    const marker = this.#drawing.querySelector(".marker");
    if (!marker) return;
    const point = index === null ? null : this.#points[index];
    marker.setAttribute("visibility", point ? "visible" : "hidden");
    if (point) for (const end of ["x1", "x2"]) marker.setAttribute(end, this.x(point.samples));
    const shown = point ?? this.#points.at(-1);
    this.#reading.textContent = `After ${count(shown.samples)} requests: ${this.read(shown)}`;
  }

  line(points, value, attributes) {
    const at = points.filter((point) => value(point) != null).map((point) => `${this.x(point.samples)},${this.y(value(point))}`);
    return svg("polyline", { ...attributes, points: at.join(" ") });
  }
}

// How much faster, with the interval that holds at every look. Points: {samples, effect, other}: what conclusions rest
// on and the estimate beside it, each {speedup, low, high}.
export class EffectPlot extends SamplePlot {
  #tell;

  constructor(label, tell) {
    super(label, 230);
    this.#tell = tell;
  }

  // Intervals begin wide: the range follows the later half.
  range(points) {
    const late = points.filter((point) => 2 * point.samples >= points.at(-1).samples);
    const ends = late.flatMap(({ effect }) => [effect.low, effect.high]).filter((end) => end != null);
    const reach = Math.max(0.02, ...ends.map(Math.abs));
    return [Math.min(-0.25 * reach, ...ends) * 1.08, Math.max(0.25 * reach, ...ends) * 1.08];
  }

  tick(value) {
    return this.#tell(value);
  }

  curves(points) {
    const bounded = points.filter((point) => point.effect.low != null && point.effect.high != null);
    const corner = (point, side) => `${this.x(point.samples)},${this.y(point.effect[side])}`;
    const outline = [...bounded.map((point) => corner(point, "high")), ...bounded.toReversed().map((point) => corner(point, "low"))];
    return [
      svg("polygon", { class: "band", points: outline.join(" ") }),
      ["low", "high"].map((side) => this.line(points, (point) => point.other[side], { class: "plain" })),
      this.line(points, (point) => point.effect.speedup, { class: "curve" }),
    ].flat();
  }

  read({ effect }) {
    if (effect.low == null || effect.high == null) return `${this.#tell(effect.speedup)}, not bounded yet`;
    return `${this.#tell(effect.speedup)}, interval ${this.#tell(effect.low)} to ${this.#tell(effect.high)}`;
  }
}

// Samples by arm. Points: {samples, by_arm}.
export class ArmsPlot extends SamplePlot {
  #names = [];

  constructor(label) {
    super(label, 150);
  }

  name(names) {
    this.#names = names;
  }

  range(points) {
    return [0, Math.max(1, ...points.at(-1).by_arm) * 1.05];
  }

  tick(value) {
    return count(value);
  }

  curves(points) {
    return points[0].by_arm.map((_, arm) => this.line(points, (point) => point.by_arm[arm], { class: "arm", "data-arm": arm }));
  }

  read({ by_arm: byArm }) {
    return byArm.map((samples, arm) => `${this.#names[arm]} ${count(samples)}`).join(", ");
  }
}

// The recent past of one number; `values` may have gaps (null).
export function sparkline(values, { low = 0, high, slots }) {
  const [width, height] = [240, 44];
  const top = Math.max(high ?? 0, ...values.filter((value) => value != null), 1e-9);
  const x = (index) => width - ((values.length - 1 - index) / (slots - 1)) * width;
  const y = (value) => 2 + (1 - (value - low) / (top - low)) * (height - 4);
  const at = values.map((value, index) => value == null ? null : `${x(index).toFixed(1)},${y(value).toFixed(1)}`).filter(Boolean);
  const drawing = svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  if (at.length > 1) {
    const area = [`${at[0].split(",")[0]},${height}`, ...at, `${at.at(-1).split(",")[0]},${height}`];
    drawing.append(svg("polygon", { class: "band", points: area.join(" ") }), svg("polyline", { class: "curve", points: at.join(" ") }));
  }
  return drawing;
}

// Rows of [name, share of the longest bar, words].
export function bars(caption, rows) {
  return h("table", { class: "bars" }, h("caption", null, caption), h("tbody", null, rows.map(([name, share, text, source]) => {
    const bar = h("span", { class: "bar-fill", "data-source": source });
    bar.style.width = `${100 * Math.min(Math.max(share, 0), 1)}%`;
    bar.hidden = share <= 0;
    return h("tr", null, h("th", { scope: "row" }, name), h("td", { class: "bar-cell" }, bar), h("td", { class: "bar-text" }, text));
  })));
}
