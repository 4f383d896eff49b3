// The groups of a train step, and the members of one of them side by side, token by token.
import { address, api, go, h, link, newest, option, problem, show, spread, strip } from "./lib.js";
import { domain, facts, image, scale, shadeSelect, transcript } from "./tokens.js";

const PAGE = 50;
const MEMBERS = 32; // rollouts of a group that are shown at first
const SORTS = [["", "order of the batch"], ["reward", "reward"], ["spread", "spread of rewards"], ["advantage", "advantage"], ["length", "length"], ["failures", "failures"]];
const SHOWN = [["", "all groups"], ["failed", "with failures"], ["truncated", "cut by a length limit"], ["mixed", "rewards differ"], ["equal", "rewards are equal"], ["dropped", "dropped"], ["replayed", "trained on again"]];

export function rollouts(root, runs) {
  const steps = new Map(); // run -> its train steps
  const bar = h("div", { class: "bar" });
  const list = h("ol", { class: "groups", "aria-label": "Groups" });
  const pager = h("div", { class: "pager" });
  const detail = h("section", { class: "detail", "aria-label": "Members" });
  root.append(bar, h("div", { class: "split" }, h("section", { class: "list" }, list, pager), detail));
  const listed = newest(), opened = newest();
  let rows = [], total = 0, step = 0, asked = "", shownGroup = "", members = [];

  async function update(state) {
    const run = Number(state.run || 0);
    if (!steps.has(run) || !runs[run].finished) steps.set(run, await api("steps", { run }));
    const all = steps.get(run);
    if (!all.length) {
      list.replaceChildren();
      detail.replaceChildren(h("p", { class: "dim" }, "No rollouts are recorded in this run: rows of files (buffer.kind: files) are not, and buffer.kind: sql keeps its groups in the database."));
      return;
    }
    const wanted = Number(state.step || all.at(-1));
    step = all.reduce((best, each) => (Math.abs(each - wanted) < Math.abs(best - wanted) ? each : best), all[0]);
    toolbar(state, run, all);
    const query = { run, step, sort: state.sort, descending: state.up ? "false" : "", text: state.text, show: state.show, least: state.least, most: state.most, first: state.first || 0, count: PAGE };
    if (JSON.stringify(query) !== asked || !runs[run].finished) {
      const current = listed();
      list.setAttribute("aria-busy", "true");
      rows = []; // keys that move among groups wait for those of this list
      let page;
      try {
        page = await api("groups", query);
      } catch (error) {
        list.replaceChildren(problem(error));
        return;
      } finally {
        list.removeAttribute("aria-busy");
      }
      if (!current()) return;
      asked = JSON.stringify(query);
      ({ rows, matching: total } = page);
      list.dataset.step = step;
      paintList(state, page);
    }
    mark(state);
    const chosen = rows.find((row) => place(row) === state.group) || (state.group ? null : rows[0]);
    if (chosen || state.group) await open(state, run, chosen);
    else detail.replaceChildren(h("p", { class: "dim" }, "no group matches"));
  }

  function toolbar(state, run, all) {
    const had = document.activeElement?.name;
    const at = all.indexOf(step);
    const change = (name) => (event) => go({ [name]: event.target.value, first: "", group: "", index: "", token: "" }, { replace: true });
    const number = h("input", { name: "step", type: "number", min: all[0], max: all.at(-1), value: step, "aria-label": "Train step", onchange: (event) => move(Number(event.target.value)) });
    const slider = h("input", { type: "range", min: 0, max: all.length - 1, value: at, "aria-label": "Train step, of those recorded", onchange: (event) => move(all[Number(event.target.value)]) });
    bar.replaceChildren(...[
      runs.length > 1 ? h("select", { name: "run", "aria-label": "Run", onchange: (event) => go({ run: event.target.value, group: "", first: "" }) }, runs.map((each) => option(String(each.number), each.name, String(run)))) : null,
      h("span", { class: "stepper" }, h("button", { onclick: () => shift(-1), disabled: at === 0, title: "Previous step (,)", "aria-label": "Previous step" }, "‹"), h("label", {}, "step ", number), h("button", { onclick: () => shift(1), disabled: at === all.length - 1, title: "Next step (.)", "aria-label": "Next step" }, "›"), slider),
      h("select", { name: "sort", "aria-label": "Sort by", onchange: change("sort") }, SORTS.map(([value, text]) => option(value, `sort: ${text}`, state.sort || ""))),
      h("button", { title: "Ascending or descending", "aria-label": state.up ? "Ascending" : "Descending", disabled: !state.sort, onclick: () => go({ up: state.up ? "" : 1, first: "" }, { replace: true }) }, state.up ? "↑" : "↓"),
      h("select", { name: "show", "aria-label": "Filter", onchange: change("show") }, SHOWN.map(([value, text]) => option(value, text, state.show || ""))),
      h("label", {}, "reward ", h("input", { name: "least", type: "number", step: "any", placeholder: "min", value: state.least || "", onchange: change("least") }), "–", h("input", { name: "most", type: "number", step: "any", placeholder: "max", value: state.most || "", onchange: change("most") })),
      h("input", { name: "text", type: "search", placeholder: "search prompts and completions ( / )", value: state.text || "", "aria-label": "Search", onchange: change("text") }),
    ].filter(Boolean));
    if (had) bar.querySelector(`[name=${had}]`)?.focus();
  }

  function paintList(state, page) {
    const first = page.first;
    list.replaceChildren(...rows.map((row) => {
      const alive = row.members.filter((member) => member.reward !== null && !member.greedy);
      const mean = alive.reduce((sum, member) => sum + member.reward, 0) / (alive.length || 1);
      const tokens = row.members.reduce((sum, member) => sum + member.tokens, 0) / (row.members.length || 1);
      const failed = row.members.filter((member) => member.failure).length;
      return h("li", {}, h("a", { href: link({ ...address(), step, group: place(row), index: "", token: "" }), data: { group: place(row) } },
        h("span", { class: "task" }, row.task),
        rewards(row),
        h("span", { class: "numbers" }, `reward ${alive.length ? show(mean) : "–"} · ${show(Math.round(tokens * 10) / 10)} tokens`,
          failed ? h("span", { class: "warn" }, ` · ${failed} failed`) : "", row.dropped ? h("span", { class: "warn" }, " · dropped") : "",
          row.steps.length > 1 ? ` · steps ${row.steps.join(", ")}` : ""),
        h("span", { class: "prompt" }, row.prompt)));
    }));
    const last = Math.min(total, first + rows.length);
    pager.replaceChildren(
      h("button", { disabled: first === 0, onclick: () => turn(-1), title: "Previous page (p)" }, "‹ previous"),
      h("span", { role: "status" }, total ? `${first + 1}–${last} of ${total}${total < page.total ? ` (${page.total} in the step)` : ""}` : "no group matches"),
      h("button", { disabled: last >= total, onclick: () => turn(1), title: "Next page (n)" }, "next ›"));
  }

  function mark(state) {
    const chosen = state.group || (rows[0] && place(rows[0]));
    list.querySelectorAll("a").forEach((each) => {
      const current = each.dataset.group === chosen;
      each.toggleAttribute("aria-current", current);
      if (current) each.scrollIntoView({ block: "nearest" });
    });
  }

  async function open(state, run, row) {
    const [stage, slot, attempt] = (row ? place(row) : state.group).split(".").map(Number);
    const count = Math.max(MEMBERS, Number(state.members || 0), Number(state.index || 0) + 1);
    const name = `${run}/${step}/${stage}.${slot}.${attempt}/${row?.size ?? 1}/${count}`;
    if (name !== shownGroup) {
      const current = opened();
      detail.setAttribute("aria-busy", "true");
      let loaded;
      try {
        loaded = await api("rollouts", { run, step, stage, slot, attempt, count });
      } catch (error) {
        if (current()) detail.replaceChildren(problem(error));
        shownGroup = "";
        return;
      } finally {
        detail.removeAttribute("aria-busy");
      }
      if (!current()) return;
      members = loaded;
      shownGroup = name;
    }
    paint(state, run, { stage, slot, attempt });
  }

  function paint(state, run, where) {
    const one = state.index === undefined ? null : Number(state.index);
    const visible = one === null ? members : members.filter((_, at) => at === one);
    if (!visible.length) return;
    const recorded = members.some((member) => member.sequences.some((sequence) => "advantages" in sequence.values));
    const shadeBy = state.shade || (recorded ? "advantages" : "log_prob");
    const range = domain(members, shadeBy);
    const [head] = members;
    const picked = state.token === undefined ? null : state.token.split(".").map(Number);
    const group = `${where.stage}.${where.slot}.${where.attempt}`;
    const keep = { ...state, run, step, group };
    detail.replaceChildren(
      h("header", {},
        h("h2", {}, head.task, h("span", { class: "dim" }, ` slot ${where.slot}${where.attempt ? `, attempt ${where.attempt}` : ""}, epoch ${head.epoch}, stage ${where.stage}`)),
        head.messages.map((message) => h("div", { class: "message" }, h("span", { class: "role" }, message.role), h("span", { class: "content" }, message.content), message.media.map((item) => image(run, item)))),
        h("p", { class: "chips" }, Object.entries(head.columns).map(([name, value]) => h("span", { class: "chip" }, h("b", {}, name), ` ${brief(value)}`))),
        head.dropped ? h("p", { class: "warn" }, `dropped: ${head.dropped}`) : null,
        h("div", { class: "bar" },
          h("label", {}, "shade by ", shadeSelect(shadeBy, members, (value) => go({ shade: value }, { replace: true }))),
          shadeBy === "none" ? null : scale(shadeBy, range),
          h("label", {}, h("input", { type: "checkbox", checked: !!state.prompt, onchange: (event) => go({ prompt: event.target.checked ? 1 : "" }, { replace: true }) }), " prompt tokens"),
          one === null ? null : h("a", { href: link({ ...keep, index: "", token: "" }) }, "all members"),
          h("a", { href: link({ view: "compare", run, step, task: head.task }) }, "compare")),
        members.some((member) => member.kept) ? null : h("p", { class: "dim" }, recorded ? "The advantage follows from the rewards. Other values of the train step need run.keep: tokens (a resumed run may set it)." : "Nothing was kept of what a train step computed for these tokens: no step took them, or run.keep: tokens is not set (a resumed run may set it).")),
      h("div", { class: one === null ? "members" : "members single" }, visible.map((member) => {
        const at = members.indexOf(member);
        return h("article", { class: `member${member.failure ? " failed" : ""}`, data: { index: at } },
          h("header", {},
            h("a", { href: link({ ...keep, index: at, token: "" }), title: "This rollout alone: the address can be shared" }, member.greedy ? "greedy" : `#${member.index}`),
            h("b", { class: "reward" }, member.reward === null ? "failed" : show(member.reward)),
            h("span", { title: "Mean advantage of its tokens" }, "advantage ", h("b", {}, show(member.advantage))),
            h("span", { class: "dim" }, `${member.tokens} tokens${member.turns > 1 ? `, ${member.turns} turns` : ""}${member.sequences.length > 1 ? ` in ${member.sequences.length} sequences` : ""} · `, h("span", { class: member.stop === "eos" ? "" : "warn" }, member.stop), member.versions.length ? ` · version ${member.versions[0] === member.versions[1] ? member.versions[0] : member.versions.join("–")}` : "")),
          participants(member).length > 1 ? h("p", { class: "chips" }, "participants", participants(member).map((name) => h("span", { class: "chip" }, h("b", {}, name || "policy"), ` ${turnsOf(member, name).length} of ${member.turns} turns, reward of steps ${show(turnsOf(member, name).reduce((sum, turn) => sum + (turn.reward ?? 0), 0))}`))) : null,
          h("p", { class: "chips" }, [...Object.entries(member.rewards), ...Object.entries(member.metrics)].map(([name, value]) => h("span", { class: "chip" }, h("b", {}, name), ` ${show(value)}`))),
          member.failure ? h("p", { class: "warn" }, member.failure) : null,
          transcript(member, { run, name: shadeBy, range, whole: !!state.prompt, picked: one === at ? picked : null, pick: ([sequence, token]) => history.replaceState(null, "", link({ ...address(), step, group, index: at, token: `${sequence}.${token}` })) }),
          one === at && picked && member.sequences[picked[0]] ? h("div", { class: "facts" }, facts(member.sequences[picked[0]], picked[1])) : null);
      })),
      one === null && members.length < head.size ? h("p", {}, h("button", { onclick: () => go({ members: members.length + MEMBERS }, { replace: true }) }, `${Math.min(MEMBERS, head.size - members.length)} more of ${head.size} rollouts`)) : "");
  }

  const turnsOf = (member, name) => member.sequences.flatMap((sequence) => sequence.turns).filter((turn) => turn.participant === name);
  const participants = (member) => [...new Set(member.sequences.flatMap((sequence) => sequence.turns.map((turn) => turn.participant)))];
  const place = (row) => `${row.stage}.${row.slot}.${row.attempt}`;
  const move = (to) => go({ step: to, group: "", first: "", index: "", token: "" });

  function shift(by) {
    const all = steps.get(Number(address().run || 0)) || [];
    const to = all[all.indexOf(step) + by];
    if (to !== undefined) move(to);
  }

  function turn(by) {
    const first = Number(address().first || 0) + by * PAGE;
    if (first >= 0 && first < total) go({ first: first || "", group: "", index: "", token: "" });
  }

  function next(by) {
    const chosen = address().group || (rows[0] && place(rows[0]));
    const to = rows[rows.findIndex((row) => place(row) === chosen) + by];
    if (to) go({ group: place(to), step, index: "", token: "" }, { replace: true });
  }

  return {
    update,
    repaint() {
      asked = "";
      update(address());
    },
    key(event) {
      const action = { j: () => next(1), k: () => next(-1), n: () => turn(1), p: () => turn(-1), ".": () => shift(1), ",": () => shift(-1), "/": () => bar.querySelector("[name=text]")?.focus() }[event.key];
      action?.();
      return !!action;
    },
  };
}

// The rewards of a group at a glance: a bar for each member; of a large group for some, sorted by their rewards.
function rewards(row) {
  const bars = row.members.map((member) => ({ value: member.failure ? null : member.reward, kind: member.failure ? "failed" : member.greedy ? "greedy" : "" }));
  const some = spread(bars);
  if (some === bars) return strip(bars, bars.map(({ value }) => (value === null ? "failed" : show(value))).join("  "));
  bars.sort((a, b) => (b.value ?? -Infinity) - (a.value ?? -Infinity));
  return strip(spread(bars), `${row.size} rollouts, sorted by reward`);
}

const brief = (value) => {
  const text = typeof value === "string" ? value : JSON.stringify(value);
  return text.length > 200 ? `${text.slice(0, 200)}…` : text;
};
