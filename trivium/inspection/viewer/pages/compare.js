// The same task at two steps, or in two runs: two rollouts side by side, and which tokens differ.
import { address, api, go, h, newest, option, problem, show } from "./lib.js";
import { facts } from "./tokens.js";
import { hideTip, showTip } from "./lib.js";

const CELLS = 3e7;

export function compare(root, runs) {
  const bar = h("div", { class: "bar" });
  const body = h("section", { class: "compare" });
  root.append(bar, body);
  const loads = newest();
  const cache = new Map();

  const once = (name, parameters) => {
    const key = `${name}?${JSON.stringify(parameters)}`;
    if (!cache.has(key)) {
      const asked = api(name, parameters);
      asked.catch(() => cache.delete(key));
      cache.set(key, asked);
    }
    return cache.get(key);
  };

  async function update(state) {
    const current = loads();
    const a = { run: Number(state.run || 0) };
    const b = { run: Number(state.other ?? (runs.length > 1 ? 1 : a.run)) };
    const [stepsA, stepsB] = await Promise.all([a, b].map((side) => once("steps", { run: side.run })));
    if (!stepsA.length || !stepsB.length) {
      body.replaceChildren(h("p", { class: "dim" }, "One of the runs has no recorded rollouts."));
      return;
    }
    const close = (all, step) => all.reduce((best, each) => (Math.abs(each - step) < Math.abs(best - step) ? each : best), all[0]);
    a.step = close(stepsA, Number(state.step || stepsA.at(-1)));
    const tasksA = await once("tasks", { run: a.run, step: a.step });
    let task = tasksA.includes(state.task) ? state.task : tasksA[0];
    if (state.to) {
      b.step = close(stepsB, Number(state.to));
      const there = state.task ? [] : await once("tasks", { run: b.run, step: b.step });
      task = tasksA.find((each) => there.includes(each)) || task;
    } else b.step = await where(b.run, stepsB, task, a);
    const tasksB = await once("tasks", { run: b.run, step: b.step });
    if (!current()) return;
    controls(state, a, b, task, tasksA, new Set(tasksB), stepsA, stepsB);
    const [left, right] = await Promise.all([a, b].map((side) => rollout(side, task, side === a ? state.index : state.second)));
    if (!current()) return;
    if (!left || !right) {
      body.replaceChildren(h("p", { class: "dim" }, `Step ${(left ? b : a).step} of ${runs[(left ? b : a).run].name} has no rollout of the task ${task}. `,
        h("button", { onclick: async () => go({ to: await where(b.run, stepsB, task, a) }) }, "look for the nearest step that has one")));
      return;
    }
    paint(left, right, a, b);
  }

  // The step nearest to the first one, other than it, that has the task: a few are looked at.
  async function where(run, steps, task, a) {
    const others = steps.filter((step) => run !== a.run || step !== a.step).sort((x, y) => Math.abs(x - a.step) - Math.abs(y - a.step));
    for (const step of others.slice(0, 60)) if ((await once("tasks", { run, step })).includes(task)) return step;
    return others[0] ?? a.step;
  }

  async function rollout(side, task, index) {
    const page = await once("groups", { run: side.run, step: side.step, text: task, count: 200 });
    const row = page.rows.find((each) => each.task === task);
    if (!row) return null;
    const at = Math.min(Number(index || 0), row.size - 1);
    const { stage, slot, attempt } = row;
    return { row, at, ...(await once("rollouts", { run: side.run, step: side.step, stage, slot, attempt, first: at }))[0] };
  }

  function controls(state, a, b, task, tasks, common, stepsA, stepsB) {
    const runSelect = (name, chosen) => h("select", { "aria-label": name === "run" ? "First run" : "Second run", onchange: (event) => go({ [name]: event.target.value }) }, runs.map((run) => option(String(run.number), run.name, String(chosen))));
    const stepInput = (name, steps, value) => h("input", { type: "number", min: steps[0], max: steps.at(-1), value, "aria-label": name === "step" ? "First step" : "Second step", onchange: (event) => go({ [name]: event.target.value }) });
    bar.replaceChildren(
      h("label", {}, "A ", runSelect("run", a.run), " step ", stepInput("step", stepsA, a.step)),
      h("label", {}, "B ", runSelect("other", b.run), " step ", stepInput("to", stepsB, b.step)),
      h("label", {}, "task ", h("select", { "aria-label": "Task", onchange: (event) => go({ task: event.target.value, to: "", index: "", second: "" }) }, tasks.map((each) => option(each, each + (common.has(each) ? " (in both)" : ""), task)))));
  }

  function paint(left, right, a, b) {
    const sides = [left, right].map((rollout) => rollout.sequences[0] || { tokens: [], text: [], values: {} });
    const from = sides.map((sequence) => sequence.turns?.[0]?.start ?? 0);
    const parts = diff(sides[0].tokens.slice(from[0]), sides[1].tokens.slice(from[1]));
    const same = parts.pairs.length, totals = sides.map((sequence, at) => sequence.tokens.length - from[at]);
    body.replaceChildren(
      h("p", { class: "facts" }, `${same} tokens are the same; ${totals[0] - same} are only in A, ${totals[1] - same} only in B`, parts.whole ? " (too long to be compared token by token: what lies between the same beginning and end is shown as different)" : ""),
      h("div", { class: "members" }, [left, right].map((rollout, at) => {
        const side = at ? b : a, kept = new Set(parts.pairs.map((pair) => pair[at]));
        const select = h("select", { "aria-label": "Member", onchange: (event) => go(at ? { second: event.target.value } : { index: event.target.value }) },
          rollout.row.members.map((member, number) => option(String(number), `${member.greedy ? "greedy" : `#${member.index}`}: ${member.failure ? "failed" : `reward ${show(member.reward)}`}`, String(rollout.at))));
        const text = h("div", { class: "segment own" }, sides[at].tokens.slice(from[at]).map((_, t) => {
          const token = h("span", { class: `t ${kept.has(t) ? "" : at ? "added" : "removed"}` }, sides[at].text[from[at] + t].replace(/\n/g, "↵\n") || "\u200b");
          token.place = from[at] + t;
          return token;
        }));
        text.addEventListener("mousemove", (event) => (event.target.place === undefined ? hideTip() : showTip(facts(sides[at], event.target.place), event.clientX, event.clientY)));
        text.addEventListener("mouseleave", hideTip);
        return h("article", { class: "member" }, h("header", {}, h("b", {}, at ? "B" : "A"), `${runs[side.run].name}, step ${side.step}`, select),
          h("p", { class: "chips" }, Object.entries(rollout.rewards).map(([name, value]) => h("span", { class: "chip" }, h("b", {}, name), ` ${show(value)}`)), h("span", { class: "chip" }, h("b", {}, "advantage"), ` ${show(rollout.advantage)}`), h("span", { class: "chip" }, h("b", {}, "version"), ` ${rollout.versions.join("–")}`)),
          rollout.failure ? h("p", { class: "warn" }, rollout.failure) : null,
          h("div", { class: "transcript" }, text),
          rollout.sequences.length > 1 ? h("p", { class: "dim" }, "its first sequence: the history was rewritten later") : null);
      })));
  }

  return {
    update: (state) => update(state).catch((error) => body.replaceChildren(problem(error))),
    repaint: () => update(address()),
  };
}

// {pairs: [[i, j], ...] of a longest common subsequence of two lists, whole: whether it was too long to be found}.
export function diff(a, b) {
  let start = 0, end = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const m = a.length - start - end, n = b.length - start - end;
  const pairs = Array.from({ length: start }, (_, i) => [i, i]);
  const whole = m * n > CELLS;
  if (!whole && m && n) {
    const width = n + 1, table = new Uint32Array((m + 1) * width);
    for (let i = m - 1; i >= 0; i--) for (let j = n - 1; j >= 0; j--) {
      table[i * width + j] = a[start + i] === b[start + j] ? table[(i + 1) * width + j + 1] + 1 : Math.max(table[(i + 1) * width + j], table[i * width + j + 1]);
    }
    for (let i = 0, j = 0; i < m && j < n;) {
      if (a[start + i] === b[start + j]) pairs.push([start + i++, start + j++]);
      else if (table[(i + 1) * width + j] >= table[i * width + j + 1]) i++;
      else j++;
    }
  }
  for (let at = end; at > 0; at--) pairs.push([a.length - at, b.length - at]);
  return { pairs, whole };
}
