// The page: tabs, keyboard, theme, and which view is shown. The address says everything.
import { address, api, go, h, hideTip, link, problem } from "./lib.js";
import { compare } from "./compare.js";
import { overview } from "./overview.js";
import { rollouts } from "./rollouts.js";
import { tasks } from "./tasks.js";
import { timeline } from "./timeline.js";

const VIEWS = { overview, rollouts, timeline, compare, tasks };
const KEYS = [
  ["1 2 3 4 5", "Overview, Rollouts, Timeline, Compare, Tasks"],
  ["j k", "next, previous group"],
  [", .", "previous, next train step"],
  ["n p", "next, previous page of groups or tasks"],
  ["/", "search"],
  ["← →", "previous, next token, in a rollout that has the focus; Home, End"],
  ["+ − 0", "zoom in, out, the whole run, in the timeline; ← → move"],
  ["t", "dark or light"],
  ["Esc", "close"],
];
const main = document.getElementById("main");
let runs = [];
let shown = null; // {name, view}

async function render() {
  const state = address();
  const name = state.view in VIEWS ? state.view : "overview";
  document.getElementById("tabs").replaceChildren(
    ...Object.keys(VIEWS).map((each) =>
      h("a", { href: link(carried(state, each)), "aria-current": each === name ? "page" : null }, title(each)),
    ),
  );
  document.title = `${title(name)} – ${runs.map((run) => run.name).join(", ")} – Trivium`;
  hideTip();
  try {
    if (shown?.name !== name) {
      shown?.view.leave?.();
      main.replaceChildren();
      shown = { name, view: VIEWS[name](main, runs) };
    }
    await shown.view.update(state);
  } catch (error) {
    main.replaceChildren(problem(error));
    shown = null;
  }
}

const title = (name) => name[0].toUpperCase() + name.slice(1);
const carried = (state, view) => (view === state.view ? state : { view, run: state.run, step: state.step, task: state.task });

function live() {
  const going = runs.filter((run) => !run.finished);
  const ages = going.map((run) => run.age_s).filter((age) => age !== null);
  const text = !going.length ? "finished" : ages.length ? `newest row ${Math.round(Math.min(...ages))} s ago` : "no rows yet";
  document.getElementById("live").textContent = text;
}

function switchTheme() {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("trivium-theme", theme);
  shown?.view.repaint?.();
}

const help = document.getElementById("help");

function showHelp() {
  const rows = KEYS.map(([keys, what]) => h("tr", {}, h("th", {}, keys), h("td", {}, what)));
  help.replaceChildren(h("h2", {}, "Keyboard"), h("table", {}, rows), h("button", { onclick: () => help.close() }, "Close"));
  help.showModal();
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (event.key === "Escape") hideTip();
  if (event.target.matches("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const view = Object.keys(VIEWS)[Number(event.key) - 1];
  if (view) go(carried(address(), view));
  else if (event.key === "t") switchTheme();
  else if (event.key === "?") showHelp();
  else if (!shown?.view.key?.(event)) return;
  event.preventDefault();
});
document.getElementById("theme").addEventListener("click", switchTheme);
document.getElementById("keys").addEventListener("click", showHelp);
addEventListener("hashchange", render);
addEventListener("trivium-live", live);

try {
  runs = await api("runs");
  runs.forEach((run, number) => Object.assign(run, { number }));
  live();
  await render();
} catch (error) {
  main.replaceChildren(problem(error));
}
