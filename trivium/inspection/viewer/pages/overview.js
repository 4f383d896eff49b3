// Curves of all runs against the step, and what each run is: verdict, findings, objective.
import { address, api, go, h, inlined, problem, seriesColour, show, swatch, variable } from "./lib.js";

const HEIGHT = 190;
const POLL_MS = 2500;
const STEPS = Array.from({ length: 7 }, (_, power) => [1, 2, 5].map((factor) => factor * 10 ** power)).flat(); // ticks are whole steps

// The ends of a y axis: a constant gets its surroundings, not 0 to 100, and differences below `floor` are rounding
// errors, which are not magnified.
export function axisRange(least, most, floor = 0) {
  const size = Math.max(Math.abs(least), Math.abs(most));
  if (!(size >= floor && size > 0)) return [0, 1];
  if (most - least < Math.max(floor, 1e-9 * size)) return [least - Math.abs(least) / 2, most + Math.abs(most) / 2];
  return uPlot.rangeNum(least, most, 0.1, true);
}

// The ends of the axis of steps: a single step gets its neighbours, where uPlot would give step 0 an axis of 0 to 100.
export const stepRange = ([step, ...others], first, last) => (others.length ? [first, last] : [Math.max(0, step - 1), step + 1]);

export function overview(root, runs) {
  const known = new Map(); // `run:key` -> {steps, values}
  const plots = new Map(); // title -> what is drawn
  let smoothing = Number(address().smooth || 0);
  let timer = null;

  const several = runs.length > 1;
  const hidden = () => new Set((address().hide || "").split(".").filter(Boolean).map(Number));
  const visible = () => runs.filter((run) => !hidden().has(run.number));
  const cards = h("section", { class: "cards", "aria-label": "Runs" }, runs.map((run) => card(run, several)));
  const switches = h("section", { class: "bar switches", "aria-label": "Runs shown" });
  const paintSwitches = () => switches.replaceChildren(...runs.map((run) => h("label", { title: run.path },
    h("input", { type: "checkbox", checked: !hidden().has(run.number), onchange: (event) => {
      const left = hidden();
      left[event.target.checked ? "delete" : "add"](run.number);
      go({ hide: [...left].join(".") }, { replace: true });
      plots.forEach(draw);
    } }), swatch(run.number), run.name, h("span", { class: "dim" }, ` ${stateOf(run)}, step ${run.step} of ${run.planned_steps}`))));
  paintSwitches();
  const slider = h("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: smoothing, "aria-label": "Smoothing" });
  slider.addEventListener("input", () => {
    smoothing = Number(slider.value);
    go({ smooth: smoothing || "" }, { replace: true });
    plots.forEach(draw);
  });
  const search = h("input", { type: "search", placeholder: "any metric, e.g. mismatch", "aria-label": "Find metrics" });
  search.addEventListener("input", () => go({ metric: search.value }, { replace: true }));
  const bar = h("div", { class: "bar" }, h("label", {}, "smoothing ", slider), search, h("span", { class: "dim" },
    `point at a curve for its values${inlined ? "" : "; click to read the rollouts of that step"}`));
  const grid = h("section", { class: "charts", "aria-label": "Curves" });
  const absent = h("p", { class: "dim absent" });
  root.append(...(several ? [switches, bar, grid, absent, differences(runs), cards] : [cards, bar, grid, absent]));

  // Charts are made when they come into sight.
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const plot = plots.get(entry.target.dataset.title);
      if (entry.isIntersecting && plot && !plot.visible) {
        plot.visible = true;
        load([plot], true);
      }
    }
  }, { rootMargin: "300px" });

  function charts(pattern) {
    const wanted = [];
    if (pattern) {
      const keys = [...new Set(runs.flatMap((run) => run.keys))].filter((key) => key.includes(pattern)).sort();
      for (const key of keys.slice(0, 60)) wanted.push({ title: key, keys: [key] });
      absent.textContent = keys.length ? (keys.length > 60 ? `60 of ${keys.length} metrics` : "") : "no metric has this in its name";
    } else {
      const missing = [];
      runs[0].charts.forEach((chart, number) => {
        const keys = [...new Set(runs.flatMap((run) => run.charts[number].keys))];
        if (keys.length) wanted.push({ title: chart.title, keys });
        else missing.push(`${chart.title} (${chart.patterns.join(", ")}${chart.lacking ? `: ${chart.lacking}` : ""})`);
      });
      absent.textContent = missing.length ? `Not logged: ${missing.join("; ")}.` : "";
    }
    plots.forEach((plot) => plot.chart?.destroy());
    plots.clear();
    seen.disconnect();
    grid.replaceChildren(...wanted.map((each) => {
      const legend = h("div", { class: "legend" });
      const area = h("div", { class: "plot" });
      const figure = h("figure", { data: { title: each.title } },
        h("figcaption", {}, h("span", {}, each.title), h("code", {}, each.keys.length > 1 ? `${each.keys.length} keys` : each.keys[0])),
        area, legend);
      plots.set(each.title, { ...each, figure, area, legend, visible: false });
      return figure;
    }));
    if (!inlined) return plots.forEach((plot) => seen.observe(plot.figure));
    plots.forEach((plot) => Object.assign(plot, { visible: true })); // a report is printed, too
    return load([...plots.values()], true);
  }

  // Asks for what was added to the keys of these charts, and draws those that changed.
  async function load(wanted, first = false) {
    const keys = [...new Set(wanted.flatMap((plot) => plot.keys))];
    if (!keys.length) return;
    await Promise.all(runs.map(async (run) => {
      const mine = keys.filter((key) => run.keys.includes(key) || !first);
      if (!mine.length) return;
      const fresh = mine.filter((key) => !known.has(`${run.number}:${key}`));
      const old = mine.filter((key) => known.has(`${run.number}:${key}`));
      const since = Math.min(...old.map((key) => known.get(`${run.number}:${key}`).rows), Infinity);
      for (const [part, after] of [[fresh, 0], [first ? [] : old, since]]) {
        if (part.length) take(run, part, after, await api("curves", { run: run.number, keys: part.join(","), after }));
      }
    }));
    wanted.forEach(draw);
  }

  function take(run, keys, after, answer) {
    const { curves, ...state } = answer;
    if (state.generation !== run.generation) known.clear(); // a resumed run cut its file: everything is read again
    Object.assign(run, state);
    for (const key of keys) {
      const place = `${run.number}:${key}`;
      const curve = curves[key] || { steps: [], values: [] };
      const before = after ? known.get(place) : null;
      if (after && !before) continue;
      const kept = before ? before.steps.filter((step) => step < (curve.steps[0] ?? Infinity)).length : 0;
      known.set(place, {
        steps: [...(before?.steps.slice(0, kept) || []), ...curve.steps],
        values: [...(before?.values.slice(0, kept) || []), ...curve.values],
        rows: state.rows, help: curve.help || before?.help, unit: curve.unit || before?.unit, floor: curve.floor || before?.floor,
      });
    }
  }

  function lines(plot) {
    const result = [];
    for (const run of visible()) for (const key of plot.keys) {
      const curve = known.get(`${run.number}:${key}`);
      if (!curve?.steps.length) continue;
      const table = broken(key, curve, run.marks, smoothing);
      const name = [runs.length > 1 ? run.name : "", plot.keys.length > 1 || runs.length === 1 ? tail(key, plot.keys) : ""];
      result.push({ run, key, table, name: name.filter(Boolean).join(" "), help: curve.help, unit: curve.unit, floor: curve.floor });
    }
    return result;
  }

  function draw(plot) {
    if (!plot.visible) return;
    const all = lines(plot);
    plot.figure.title = all[0]?.help || "";
    const dashes = [[], [5, 4], [2, 3], [8, 3, 2, 3]];
    const floor = Math.max(0, ...all.map((line) => line.floor));
    const series = all.map((line, number) => {
      return {
        label: line.name,
        stroke: seriesColour(several ? line.run.number : number),
        width: 1.6,
        dash: several ? dashes[plot.keys.indexOf(line.key) % dashes.length] : undefined,
        points: { size: 5 },
      };
    });
    plot.chart?.destroy();
    plot.lines = all;
    legend(plot, null);
    if (!all.length) {
      plot.area.replaceChildren(h("p", { class: "dim" }, "no values yet"));
      return;
    }
    const data = uPlot.join(all.map((line) => line.table));
    const axis = { stroke: variable("--dim"), grid: { stroke: variable("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    plot.area.replaceChildren();
    plot.chart = new uPlot({
      width: plot.area.clientWidth || 360, height: HEIGHT, series: [{}, ...series],
      scales: { x: { time: false, range: (chart, first, last) => stepRange(chart.data[0], first, last) }, y: { range: (_, least, most) => axisRange(least, most, floor) } },
      axes: [{ ...axis, space: 60, size: 28, incrs: STEPS }, { ...axis, size: 56, values: (_, ticks) => ticks.map(show) }],
      legend: { show: false },
      cursor: { sync: { key: "step" }, drag: { x: true, y: false }, points: { size: 7 } },
      hooks: {
        draw: [(chart) => marks(chart, visible())],
        setCursor: [(chart) => legend(plot, chart.cursor.idx)],
      },
    }, data, plot.area);
    plot.chart.over.addEventListener("click", () => {
      const step = plot.chart.data[0][plot.chart.cursor.idx];
      const [dragged] = [plot.chart.select.width];
      if (step !== undefined && !dragged && !inlined) go({ view: "rollouts", run: all[0].run.number, step: Math.round(step) });
    });
  }

  function legend(plot, index) {
    const step = index === null || index === undefined ? null : plot.chart?.data[0][index];
    plot.legend.replaceChildren(
      ...plot.lines.map((line, number) => {
        const [steps, values] = line.table;
        const at = step === null ? last(values) : nearest(steps, values, step);
        return h("span", {}, swatch(several ? line.run.number : number), line.name ? `${line.name} ` : "", h("b", {}, show(at)), line.unit ? ` ${line.unit}` : "");
      }),
      step === null ? "" : h("span", { class: "dim" }, `step ${Math.round(step)}`),
    );
  }

  async function poll() {
    if (document.visibilityState === "visible" && runs.some((run) => !run.finished)) {
      try {
        const before = runs.map((run) => run.rows).join();
        const visible = [...plots.values()].filter((plot) => plot.visible);
        const answers = await Promise.all(runs.map((run) => api("curves", { run: run.number, keys: "step", after: run.rows })));
        if (answers.map((answer) => answer.rows).join() !== before) await load(visible);
        answers.forEach((answer, number) => Object.assign(runs[number], { age_s: answer.age_s, finished: answer.finished }));
        runs.forEach((run) => run.facts.replaceChildren(...factsOf(run))); // a card that was opened stays open
        paintSwitches();
      } catch (error) {
        document.getElementById("live").textContent = `the server does not answer: ${error.message}`;
        return;
      }
    }
    dispatchEvent(new Event("trivium-live"));
  }

  const resized = new ResizeObserver(() => plots.forEach((plot) =>
    plot.chart?.setSize({ width: plot.area.clientWidth, height: HEIGHT })));
  resized.observe(grid);
  let pattern = null;
  return {
    async update(state) {
      if ((state.metric || "") !== pattern) {
        pattern = state.metric || "";
        search.value = pattern;
        charts(pattern);
      }
      if (!inlined) timer ??= setInterval(poll, POLL_MS);
    },
    repaint() {
      plots.forEach(draw);
      paintSwitches();
      cards.replaceChildren(...runs.map((run) => card(run, several)));
    },
    key(event) {
      if (event.key !== "/") return false;
      search.focus();
      return true;
    },
    leave() {
      clearInterval(timer);
      seen.disconnect();
      resized.disconnect();
      plots.forEach((plot) => plot.chart?.destroy());
    },
  };
}

const tail = (key, keys) => (keys.length > 1 ? key.split("/").slice(1).join("/") : "");
const last = (values) => values.findLast((value) => value !== null && value !== undefined) ?? null;

function nearest(steps, values, step) {
  let found = null;
  for (let at = 0; at < steps.length && steps[at] <= step; at++) if (values[at] !== null) found = values[at];
  return found;
}

// [steps, values], smoothed, with a gap where a stage begins between two steps.
function broken(key, curve, marks, smoothing) {
  const stages = marks.filter((mark) => mark.kind === "stage").map((mark) => mark.step);
  const steps = [], values = [];
  let mean = null;
  curve.steps.forEach((step, at) => {
    const before = curve.steps[at - 1];
    // An evaluation before the first step of a stage is its first point; a train step is the last of the stage before.
    if (at && stages.some((stage) => (key.startsWith("eval/") ? before < stage : before <= stage) && stage < step)) {
      steps.push((before + step) / 2);
      values.push(null);
      mean = null;
    }
    mean = mean === null ? curve.values[at] : smoothing * mean + (1 - smoothing) * curve.values[at];
    steps.push(step);
    values.push(mean);
  });
  return [steps, values];
}

// Vertical lines where stages begin, sessions resume and the config changed.
function marks(chart, runs) {
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.font = `${10 * devicePixelRatio}px system-ui`;
  ctx.textAlign = "left";
  ctx.textBaseline = "alphabetic";
  ctx.lineWidth = devicePixelRatio;
  const seen = new Set(), placed = [];
  for (const run of runs) for (const mark of run.marks) {
    if (mark.step === 0) continue;
    const x = chart.valToPos(mark.step + 0.5, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = ctx.fillStyle = mark.kind === "stage" ? variable("--dim") : variable("--accent");
    ctx.setLineDash(mark.kind === "stage" ? [4 * devicePixelRatio, 3 * devicePixelRatio] : [1, 3]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    const label = mark.kind === "stage" ? mark.text : mark.kind;
    if (seen.has(`${Math.round(x)} ${label}`)) continue;
    seen.add(`${Math.round(x)} ${label}`);
    const width = ctx.measureText(label).width;
    const left = x + 4 + width > bbox.left + bbox.width ? x - 4 - width : x + 4;
    const free = [0, 1, 2].find((row) => placed.every((each) => each.row !== row || left > each.right || left + width < each.left));
    if (free === undefined) continue; // the list of the run's card has it
    placed.push({ row: free, left: left - 4, right: left + width + 4 });
    ctx.fillText(label, left, bbox.top + (11 + 12 * free) * devicePixelRatio);
  }
  ctx.restore();
}

// --------------------------------------------------------------------------- what a run is

const stateOf = (run) => run.finished ? "finished" : run.age_s === null ? "no rows yet" : run.age_s < 120 ? "in progress" : `no row for ${Math.round(run.age_s / 60)} min`;
const factsOf = (run) => [h("span", { class: `state ${run.finished ? "done" : ""}` }, stateOf(run)),
  ` step ${run.step} of ${run.planned_steps} · `, h("span", { class: "path" }, run.path)];

// The settings in which the configs of the runs differ.
function differences(runs) {
  const text = (run, key) => (key in run.settings ? JSON.stringify(run.settings[key]) : "–");
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))].filter((key) => key !== "run.dir" && new Set(runs.map((run) => text(run, key))).size > 1);
  return h("details", { class: "differences" }, h("summary", {}, keys.length ? `${keys.length} differences of the configs` : "the configs do not differ"),
    h("table", { class: "plain" }, h("tr", {}, h("th", {}), runs.map((run) => h("th", {}, swatch(run.number), run.name))),
      keys.map((key) => h("tr", {}, h("th", {}, h("code", {}, key)), runs.map((run) => h("td", {}, text(run, key)))))));
}

function card(run, folded) {
  const details = h("div", { class: "verdict" });
  const load = () => verdictOf(run).then((answer) => details.replaceChildren(...told(answer)), (error) => details.replaceChildren(problem(error)));
  const notes = run.marks.filter((mark) => mark.kind !== "stage").map((mark) => h("li", {}, mark.text));
  run.facts = h("p", { class: "facts" }, factsOf(run));
  if (!folded) load();
  return h(folded ? "details" : "article", { class: "card", ontoggle: load },
    folded ? h("summary", {}, swatch(run.number), run.name) : h("h2", {}, swatch(run.number), run.name),
    run.facts,
    notes.length ? h("ul", { class: "notes" }, notes) : null,
    details,
    inlined ? null : h("details", {}, h("summary", {}, "config.yaml"), h("pre", {}, run.config)));
}

function verdictOf(run) {
  run.verdict ??= api("verdict", { run: run.number });
  return run.verdict;
}

function told(answer) {
  const parts = [h("p", {}, answer.verdict)];
  if (answer.doctor.error) parts.push(h("p", { class: "dim" }, `doctor: ${answer.doctor.error}`));
  else if (answer.doctor.findings.length) {
    parts.push(h("ul", { class: "findings" }, answer.doctor.findings.map((each) =>
      h("li", {}, h("b", {}, each.rule), `: ${each.figures}`, h("div", { class: "dim" }, `do: ${each.do}`)))));
  } else parts.push(h("p", { class: "healthy" }, `doctor: ${answer.doctor.no_findings}`));
  const objective = answer.objective.error || answer.objective;
  parts.push(h("details", {}, h("summary", {}, "objective, with its values"), h("pre", {}, objective)));
  return parts;
}
