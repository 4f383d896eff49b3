// The page of `trivium report`: one run, whose values are inside the file.
import { address, h, inlined, show } from "./lib.js";
import { overview } from "./overview.js";
import { domain, scale, titleOf, transcript } from "./tokens.js";

document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";

const part = (title, ...content) => h("section", { class: "part" }, h("h2", {}, title), content);
const table = (values) => h("table", { class: "plain" }, Object.entries(values).map(([key, value]) =>
  h("tr", {}, h("th", {}, key), h("td", {}, String(value)))));

function facts() {
  return h("dl", { class: "results" }, Object.entries(inlined.facts).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function example(each) {
  const advantages = each.sequences.some((sequence) => "advantages" in sequence.values);
  const name = advantages ? "advantages" : "log_prob", range = domain([each], name);
  const components = Object.entries(each.rewards);
  return h("article", { class: `member ${each.kind}` },
    h("header", {},
      h("b", { class: "kind" }, each.kind), `step ${each.step} · task ${each.task}`,
      each.failure ? null : h("b", { class: "reward" }, `reward ${show(each.reward)}`),
      each.failure || components.length < 2 ? null : h("span", {}, components.map(([key, value]) => `${key} ${show(value)}`).join(", ")),
      each.failure ? null : h("span", { class: "dim" }, `${each.tokens} tokens · ${each.stop}`),
      range ? h("span", { class: "dim" }, `${titleOf(name)} `, scale(name, range)) : null),
    each.failure ? h("p", { class: "warn" }, each.failure) : null,
    each.sequences.length ? transcript(each, { run: 0, name, range, whole: true, picked: null })
      : h("p", { class: "segment" }, each.messages.map((message) => message.content).join("\n")),
    each.omitted ? h("p", { class: "dim" }, `… ${each.omitted} more tokens`) : null);
}

function examples() {
  if (!inlined.examples.length) return part("Rollouts", h("p", { class: "dim" }, "None are recorded."));
  return part("Rollouts", h("p", { class: "dim" }, `Of the ${inlined.of}: the best, the worst, and those that failed lately. `
    + "Tokens are shaded by their advantage, or by how improbable they were if the run has no advantages (run.keep: tokens)."),
    inlined.examples.map(example));
}

const main = document.getElementById("main"), curves = h("div", {});
main.append(facts(), curves, examples(),
  part("Environment", Object.keys(inlined.machine).length ? table(inlined.machine) : h("p", {}, "not noted")),
  part("Config", h("details", {}, h("summary", {}, `${Object.keys(inlined.settings).length} values, secrets left out`), table(inlined.settings))));
const view = overview(curves, inlined.runs.map((run, number) => Object.assign(run, { number })));
view.update(address());
addEventListener("hashchange", () => view.update(address()));
