// What every view uses: elements, the server's values, the address, numbers and colours.

// An element. Text is always a text node: nothing that a model wrote is ever parsed as HTML.
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function option(value, text, chosen, more = {}) {
  return h("option", { value, selected: value === chosen, ...more }, text);
}

export class RunError extends Error {
  constructor(answer) {
    super(`${answer.asked}: ${answer.found}`);
    this.todo = answer.do;
  }
}

// The values of a report, which are inside its file; null in a page that a server sends.
const values = document.getElementById("values");
export const inlined = values && JSON.parse(values.textContent);

export async function api(name, parameters = {}) {
  if (inlined) return inlined[name];
  const given = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== "" && value !== null);
  const response = await fetch(`api/${name}?${new URLSearchParams(given)}`);
  if (response.status === 400) throw new RunError(await response.json());
  if (!response.ok) throw new Error(`${response.status}: the server says ${await response.text()}`);
  return response.json();
}

export function problem(error) {
  return h("p", { class: "problem", role: "alert" }, error.message, error.todo ? ` – ${error.todo}` : "");
}

// --------------------------------------------------------------------------- the address: #/view?name=value

export function address() {
  const [view, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: view || "overview", ...Object.fromEntries(new URLSearchParams(query || "")) };
}

export function link(state) {
  const { view, ...rest } = state;
  const given = Object.entries(rest).filter(([, value]) => value !== undefined && value !== "" && value !== null);
  return `#/${view}?${new URLSearchParams(given)}`;
}

// Changes parts of the address; a value of "" leaves it out.
export function go(change, { replace = false } = {}) {
  const target = link({ ...address(), ...change });
  if (target === location.hash) return;
  if (!replace) location.hash = target;
  else {
    history.replaceState(null, "", target);
    dispatchEvent(new Event("hashchange"));
  }
}

// --------------------------------------------------------------------------- numbers

export function show(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

export function seconds(value) {
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 2 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return value < 7200 ? `${(value / 60).toFixed(1)} min` : `${(value / 3600).toFixed(1)} h`;
}

// --------------------------------------------------------------------------- colours

// Any two differ for the colour-blind as well, the first five by a lot (tests/e2e/test_view.py).
const SERIES = {
  light: ["#1f5fbf", "#f95720", "#4a2424", "#c07c9e", "#7c06f1", "#8c2604", "#3b2f61", "#f920f9"],
  dark: ["#7cb0ff", "#f98006", "#fed4c6", "#7346fa", "#ac8053", "#c1fc86", "#f906bc", "#ac5369"],
};

export const theme = () => document.documentElement.dataset.theme;
export const seriesColour = (number) => SERIES[theme()][number % SERIES.light.length];
export const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function swatch(number) {
  const square = h("i", { class: "swatch" });
  square.style.background = seriesColour(number);
  return square;
}

// At most BARS of these, evenly spread, the first and the last among them.
export const BARS = 24;
export const spread = (items) =>
  items.length <= BARS ? items : Array.from({ length: BARS }, (_, at) => items[Math.round((at * (items.length - 1)) / (BARS - 1))]);

// Numbers at a glance: a bar for each of `items`, {value, kind}, by the largest value; a failed one is hatched.
export function strip(items, title, largest = 0) {
  const values = items.map((item) => item.value).filter((value) => value !== null);
  const least = Math.min(0, ...values), most = Math.max(largest, ...values, least + 1e-9);
  return h("span", { class: `strip${items.length > BARS / 2 ? " dense" : ""}`, title }, items.map(({ value, kind }) => {
    const bar = h("i", { class: kind || "" });
    bar.style.height = value === null ? "100%" : `${8 + 92 * ((value - least) / (most - least))}%`;
    return bar;
  }));
}

// --------------------------------------------------------------------------- the tooltip

const tip = () => document.getElementById("tip");

export function showTip(content, x, y) {
  const box = tip();
  box.replaceChildren(...[content].flat());
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
  box.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - height - 10) : y + 18}px`;
}

export function hideTip() {
  tip().hidden = true;
}

// The number of the newest of several loads: an older one that returns later is dropped.
export function newest() {
  let count = 0;
  return () => {
    const mine = ++count;
    return () => mine === count;
  };
}
