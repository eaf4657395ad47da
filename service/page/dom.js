// Elements, made without any markup: text is always text, so names and answers are inert.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

// Replaces what an element holds.
export function fill(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

// Says something to people who listen to the page.
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value != null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

let lastId = 0;

// A control with its label, and a word of explanation where one helps.
export function field(label, control, hint) {
  control.id ||= `field-${++lastId}`;
  const parts = [h("label", { for: control.id }, label), control];
  if (hint) {
    control.setAttribute("aria-describedby", `${control.id}-hint`);
    parts.push(h("p", { class: "hint", id: `${control.id}-hint` }, hint));
  }
  return h("div", { class: "field" }, parts);
}

export function select(options, attributes) {
  return h("select", attributes, options.map(([value, text]) => h("option", { value }, text ?? value)));
}

// A word in a pill: the state of something.
export function chip(state) {
  return h("span", { class: "chip", "data-state": state }, state);
}

export function table(caption, head, rows) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", null,
      h("caption", null, caption),
      h("thead", null, h("tr", null, head.map((title) => h("th", { scope: "col" }, title)))),
      h("tbody", null, rows.map(([first, ...rest]) =>
        h("tr", null, h("th", { scope: "row" }, first), rest.map((cell) => h("td", null, cell)))))));
}
