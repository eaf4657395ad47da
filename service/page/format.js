// Numbers as people read them. What is not known is a dash.

const NONE = "–";
const whole = new Intl.NumberFormat("en");

export function count(value) {
  return value == null ? NONE : whole.format(Math.round(value));
}

export function number(value, digits = 1) {
  return value == null || !Number.isFinite(value) ? NONE : minus(value.toFixed(digits));
}

// Three significant digits, for values of any size.
export function figure(value) {
  return value == null || !Number.isFinite(value) ? NONE : minus(String(Number(value.toPrecision(3))));
}

export function percent(share, { signed = false, digits } = {}) {
  if (share == null || !Number.isFinite(share)) return NONE;
  const value = 100 * share;
  const text = value.toFixed(digits ?? (Math.abs(value) >= 9.95 || value === 0 ? 0 : 1));
  return `${signed && value > 0 ? "+" : ""}${minus(text)} %`;
}

export function duration(seconds) {
  if (seconds == null || !Number.isFinite(seconds)) return NONE;
  const size = Math.abs(seconds);
  if (size === 0) return "0 ms";
  if (size < 0.00095) return `${number(seconds * 1e6, 0)} µs`;
  if (size < 0.00995) return `${number(seconds * 1e3, 1)} ms`;
  if (size < 0.9995) return `${number(seconds * 1e3, 0)} ms`;
  if (size < 99.5) return `${number(seconds, size < 9.95 ? 2 : 1)} s`;
  return size < 5400 ? `${number(seconds / 60, 1)} min` : `${number(seconds / 3600, 1)} h`;
}

export function instant(seconds) {
  return seconds == null ? NONE : new Date(1000 * seconds).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}

// A config in one line: ngram · num_speculative_tokens 4 · max_n 3
export function config(speculation) {
  const { method, ...rest } = speculation;
  const said = Object.entries(rest)
    .filter(([, value]) => value !== "auto")
    .map(([name, value]) => `${name} ${Array.isArray(value) ? value.map((one) => one.method).join(", ") : value}`);
  return [method, ...said].join(" · ");
}

export function words(name) {
  return name.replaceAll("_", " ");
}

// With a real minus sign, and none before a zero.
function minus(text) {
  return text.replace(/^-(?=[0.]*$)/, "").replace("-", "−");
}
