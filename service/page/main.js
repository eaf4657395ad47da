// The page: three views, shown by the part of the address behind the #, and what is served.

import { h, field, fill } from "./dom.js";
import { call, setKey } from "./api.js";
import { EngineScreen } from "./engine.js";
import { ExperimentsScreen } from "./experiments.js";
import { Playground } from "./playground.js";
import { Choices } from "./speculation.js";

const VIEWS = ["playground", "experiments", "engine"];
const RETRY_SECONDS = 2;

// The methods and profiles, as soon as the model is loaded.
async function load() {
  const served = document.getElementById("served");
  const choices = new Choices();
  for (;;) {
    try {
      const { data: [model] } = await call("GET", "v1/models");
      await choices.load();
      choices.model = model;
      fill(served, model.id);
      served.title = model.description;
      served.dataset.state = "ready";
      return choices;
    } catch (error) {
      served.dataset.state = "waiting";
      fill(served, error.status === 503 ? "loading the model" : error.status === 401 ? "needs a key" : error.message);
      if (error.status === 401) await askForKey();
      else await new Promise((resolve) => setTimeout(resolve, 1000 * RETRY_SECONDS));
    }
  }
}

// Resolves when somebody has given a key.
function askForKey() {
  const input = h("input", { type: "password", autocomplete: "off", required: true });
  return new Promise((resolve) => {
    const form = h("form", { class: "key-form", onsubmit: (event) => {
      event.preventDefault();
      setKey(input.value.trim());
      form.remove();
      resolve();
    } }, field("API key", input, "This service needs one. It stays in this tab, until the tab is closed."), h("button", { class: "primary" }, "Open"));
    document.getElementById("content").append(form);
    input.focus();
  });
}

function route() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  return { view: VIEWS.includes(name) ? name : VIEWS[0], rest: decodeURIComponent(rest.join("/")) };
}

const section = (name) => document.getElementById(name);
const choices = await load();
const screens = {
  playground: new Playground(section("playground"), choices),
  experiments: new ExperimentsScreen(section("experiments"), choices),
  engine: new EngineScreen(section("engine")),
};

function show({ moveFocus }) {
  const { view, rest } = route();
  for (const name of VIEWS) section(name).hidden = name !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `forerun · ${view}`;
  screens[view].shown?.(rest);
  if (moveFocus) document.getElementById("content").focus({ preventScroll: true });
}

window.addEventListener("hashchange", () => show({ moveFocus: true }));
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("content").focus();
});
show({ moveFocus: false });
document.body.dataset.ready = "";
