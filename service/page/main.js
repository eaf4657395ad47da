// The page: three views, shown by the part of the address behind the #, and what is served.

import { fill } from "./dom.js";
import { call } from "./api.js";
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
      const engine = await call("GET", "v1/engine");
      if (engine.model) {
        await choices.load();
        fill(served, engine.model.name);
        served.title = engine.model.description;
        served.dataset.state = "ready";
        return choices;
      }
      fill(served, "loading the model");
    } catch (error) {
      fill(served, error.message);
    }
    served.dataset.state = "waiting";
    await new Promise((resolve) => setTimeout(resolve, 1000 * RETRY_SECONDS));
  }
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
