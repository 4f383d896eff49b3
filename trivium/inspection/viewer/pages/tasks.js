// Every task of a run over its train steps: how often it succeeds, at first and at last.
import { address, api, go, h, link, newest, option, problem, show, spread, strip } from "./lib.js";

const PAGE = 100;

export function tasks(root, runs) {
  const bar = h("div", { class: "bar" });
  const table = h("table", { class: "plain tasks" });
  const pager = h("div", { class: "pager" });
  root.append(bar, h("section", { class: "wide", "aria-label": "Tasks" }, table), pager);
  const loads = newest();
  let page = null, asked = "";

  async function update(state) {
    const run = Number(state.run || 0);
    const query = { run, sort: state.by, descending: state.up ? "false" : "", text: state.text, first: state.first || 0, count: PAGE };
    if (JSON.stringify(query) === asked && runs[run].finished) return;
    const current = loads();
    table.setAttribute("aria-busy", "true");
    try {
      const answer = await api("progress", query);
      if (!current()) return;
      [page, asked] = [answer, JSON.stringify(query)];
    } catch (error) {
      table.replaceChildren(h("caption", {}, problem(error)));
      return;
    } finally {
      table.removeAttribute("aria-busy");
    }
    paint(state, run);
  }

  function paint(state, run) {
    const value = page.graded ? show : (rate) => `${(100 * rate).toFixed(0)} %`;
    const what = page.graded ? "mean reward" : "success rate";
    const cell = (row, point) => h("td", {}, h("a", { href: to(run, row, point), title: `Rollouts of step ${point.step}` }, value(point.value)));
    const learned = page.rows.some((row) => row.expected !== undefined);
    const heads = [["task", "task"], ["first", `${what}, first`], ["last", "last"], ["change", "change"], ["", "over the steps"], ["times", "steps"], ["rollouts", "rollouts"], ...(learned ? [["expected", "expected by the curriculum"]] : [])];
    if (!bar.contains(document.activeElement)) {
      bar.replaceChildren(...[
        runs.length > 1 ? h("select", { "aria-label": "Run", onchange: (event) => go({ run: event.target.value, first: "" }) }, runs.map((each) => option(String(each.number), each.name, String(run)))) : null,
        h("input", { name: "text", type: "search", placeholder: "search tasks and prompts ( / )", value: state.text || "", "aria-label": "Search", onchange: (event) => go({ text: event.target.value, first: "" }, { replace: true }) }),
      ].filter(Boolean));
    }
    table.replaceChildren(
      h("tr", {}, heads.map(([by, title]) => h("th", { "aria-sort": by && state.by === by ? (state.up ? "ascending" : "descending") : null },
        by ? h("button", { onclick: () => go({ by, up: state.by === by && !state.up ? 1 : "", first: "" }, { replace: true }) }, title, state.by === by ? (state.up ? " ↑" : " ↓") : "") : title))),
      ...page.rows.map((row) => {
        const first = row.points[0], last = row.points.at(-1), change = last.value - first.value;
        return h("tr", {},
          h("td", {}, h("a", { class: "task", href: to(run, row, last), title: row.prompt }, row.task), h("span", { class: "dim" }, ` ${row.taskset}`)),
          cell(row, first), cell(row, last),
          h("td", { class: change < 0 ? "warn" : "" }, `${change > 0 ? "+" : ""}${page.graded ? show(change) : (100 * change).toFixed(0)}`),
          h("td", {}, strip(spread(row.points), `steps ${first.step} to ${last.step}`, page.graded ? 0 : 1)),
          h("td", {}, row.points.length), h("td", {}, row.rollouts),
          learned ? h("td", {}, row.expected === undefined ? "" : `${(100 * row.expected).toFixed(0)} %${row.retired ? ", retired" : ""}`) : null);
      }));
    const end = page.first + page.rows.length;
    pager.replaceChildren(
      h("button", { disabled: page.first === 0, onclick: () => turn(-1) }, "‹ previous"),
      h("span", { role: "status" }, page.matching ? `${page.first + 1}–${end} of ${page.matching} tasks` : page.total ? "no task matches" : "No rollouts are recorded in this run."),
      h("button", { disabled: end >= page.matching, onclick: () => turn(1) }, "next ›"));
  }

  const to = (run, row, point) => link({ view: "rollouts", run, step: point.step, group: point.group, text: row.task });

  function turn(by) {
    const first = (page?.first || 0) + by * PAGE;
    if (page && first >= 0 && first < page.matching) go({ first: first || "" });
  }

  return {
    update,
    repaint: () => {},
    key(event) {
      const action = { n: () => turn(1), p: () => turn(-1), "/": () => bar.querySelector("[name=text]")?.focus() }[event.key];
      action?.();
      return !!action;
    },
  };
}
