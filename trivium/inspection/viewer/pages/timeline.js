// When each role did what: lanes of spans on a canvas, zoomed with the wheel or the keyboard.
import { api, h, hideTip, newest, option, go, problem, seconds, showTip, theme, variable } from "./lib.js";

const ROW = 20, LABEL = 150, AXIS = 24;
const COLOURS = {
  light: { generate: "#2b7bd6", reward: "#c2571a", wait: "#b7bdc6", train: "#b9d9c3", score: "#8b5cc7", advantage: "#c79a14", update: "#2c8a52", sync: "#c03a78", "load weights": "#c03a78", checkpoint: "#6b7280", evaluate: "#148a9c" },
  dark: { generate: "#6aa8f5", reward: "#f59356", wait: "#4a515c", train: "#2c4d3a", score: "#b794ee", advantage: "#e5c255", update: "#5cc183", sync: "#ec7fb0", "load weights": "#ec7fb0", checkpoint: "#9aa3af", evaluate: "#54c3d3" },
};
const colour = (name) => COLOURS[theme()][name.split(/[/ ]/)[0]] || COLOURS[theme()][name] || "#888";

function clock(at, each) {
  if (at < each / 2) return "0";
  if (each < 1) return seconds(at);
  const whole = Math.round(at), parts = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  if (whole < 60) return `${whole} s`;
  return (parts[0] ? parts : parts.slice(1)).map((part, number) => (number ? String(part).padStart(2, "0") : part)).join(":");
}

export function timeline(root, runs) {
  const bar = h("div", { class: "bar" });
  const canvas = h("canvas", { class: "lanes", tabIndex: 0, role: "img", "aria-label": "Lanes of the roles of the run" });
  const below = h("div", {});
  root.append(bar, canvas, below);
  let run = -1, answer = null, view = null, whole = null, hits = [], drag = null, waiting = null;
  const loads = newest();

  async function update(state) {
    const wanted = Number(state.run || 0);
    if (wanted === run) return;
    run = wanted;
    view = null;
    bar.replaceChildren(...[
      runs.length > 1 ? h("select", { "aria-label": "Run", onchange: (event) => go({ run: event.target.value }) }, runs.map((each) => option(String(each.number), each.name, String(run)))) : null,
      h("button", { onclick: () => zoom(0.5) }, "+"), h("button", { onclick: () => zoom(2) }, "−"), h("button", { onclick: reset }, "whole run"),
      h("a", { class: "button", href: `trace/${run}.json`, download: "" }, "Download trace (Chrome, Perfetto)"),
      h("span", { class: "dim" }, "wheel: zoom · drag: move · double-click: whole run"),
    ].filter(Boolean));
    await load();
  }

  async function load() {
    const current = loads();
    const given = await api("timeline", { run, start: view?.start, stop: view?.stop });
    if (!current()) return;
    answer = given;
    if (!answer.lanes.length) {
      canvas.hidden = true;
      below.replaceChildren(h("p", { class: "dim" }, "This run noted no spans: a version without a timeline wrote it, or it has not begun."));
      return;
    }
    canvas.hidden = false;
    whole = { start: answer.first, stop: answer.last };
    view ??= { start: answer.start, stop: answer.stop };
    paint();
    below.replaceChildren(key(answer), table(answer));
  }

  function paint() {
    if (!answer?.lanes.length) return;
    const width = root.clientWidth, ratio = devicePixelRatio;
    const rows = answer.lanes.reduce((sum, lane) => sum + Math.max(1, lane.rows.length), 0);
    const height = AXIS + rows * ROW + answer.lanes.length * 8;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    const ctx = canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    ctx.font = "12px system-ui";
    ctx.textBaseline = "middle";
    const length = view.stop - view.start || 1e-6;
    const x = (time) => LABEL + ((time - view.start) / length) * (width - LABEL);
    ticks(ctx, x, width, height);
    hits = [];
    let y = AXIS;
    for (const lane of answer.lanes) {
      const tall = Math.max(1, lane.rows.length) * ROW;
      ctx.fillStyle = variable("--panel");
      ctx.fillRect(LABEL, y, width - LABEL, tall);
      ctx.save();
      ctx.beginPath();
      ctx.rect(LABEL, 0, width - LABEL, height);
      ctx.clip();
      lane.rows.forEach((row, depth) => {
        for (const [start, stop, name, number, about] of row) {
          const left = x(answer.start + start), right = Math.max(x(answer.start + stop), left + 0.7);
          if (right < LABEL || left > width) continue;
          ctx.fillStyle = colour(name);
          ctx.globalAlpha = number > 1 ? 0.75 : 1;
          ctx.fillRect(left, y + depth * ROW + 1, right - left, ROW - 2);
          ctx.globalAlpha = 1;
          hits.push({ left, right, top: y + depth * ROW, lane: lane.name, name, number, about, seconds: stop - start, start });
          if (right - left > 60 && number === 1) {
            ctx.fillStyle = name === "wait" || name === "train" ? variable("--text") : theme() === "dark" ? "#10141a" : "#fff";
            const room = right - Math.max(left, LABEL) - 8;
            const label = [`${name} ${seconds(stop - start)}`, name, ""].find((text) => ctx.measureText(text).width <= room);
            ctx.fillText(label, Math.max(left, LABEL) + 5, y + depth * ROW + ROW / 2);
          }
        }
      });
      ctx.restore();
      ctx.fillStyle = variable("--text");
      ctx.fillText(lane.name, 4, y + ROW / 2, LABEL - 54);
      ctx.fillStyle = variable("--dim");
      ctx.fillText(`${(100 * lane.busy).toFixed(0)} %`, LABEL - 42, y + ROW / 2);
      y += tall + 8;
    }
  }

  function ticks(ctx, x, width, height) {
    const length = view.stop - view.start, rough = length / Math.max(2, (width - LABEL) / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const round = rough < 10 ? [1, 2, 5, 10].map((factor) => factor * power) : [10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 21600, 86400];
    const each = round.find((size) => size >= rough) || Math.ceil(rough / 86400) * 86400;
    for (let at = Math.ceil((view.start - whole.start) / each) * each; at <= view.stop - whole.start; at += each) {
      const left = x(whole.start + at);
      ctx.fillStyle = variable("--line");
      ctx.fillRect(left, AXIS - 6, 1, height);
      ctx.fillStyle = variable("--dim");
      ctx.fillText(clock(at, each), left + 4, AXIS / 2);
    }
  }

  function key(given) {
    const names = [...new Set(given.lanes.flatMap((lane) => lane.rows.flatMap((row) => row.map((span) => span[2].split("/")[0].replace(/^evaluate .*/, "evaluate")))))];
    return h("p", { class: "legend" }, names.map((name) => {
      const swatch = h("i", {});
      swatch.style.background = colour(name);
      return h("span", {}, swatch, name);
    }));
  }

  function table(given) {
    return h("table", { class: "plain" }, h("caption", {}, `Of the ${seconds(given.stop - given.start)} shown, busy with anything but waiting`),
      given.lanes.map((lane) => h("tr", {}, h("th", {}, lane.name), h("td", {}, `${(100 * lane.busy).toFixed(1)} %`), h("td", {}, `idle ${seconds((1 - lane.busy) * (given.stop - given.start))}`))));
  }

  // The same spans move at once; sharper ones follow when the movement has ended.
  function show(start, stop) {
    const total = whole.stop - whole.start, length = Math.min(Math.max(stop - start, 1e-4), total);
    const begin = Math.min(Math.max(start, whole.start), whole.stop - length);
    view = { start: begin, stop: begin + length };
    paint();
    clearTimeout(waiting);
    waiting = setTimeout(() => load().catch((error) => below.replaceChildren(problem(error))), 120);
  }

  function zoom(factor, at = (view.start + view.stop) / 2) {
    if (view) show(at - (at - view.start) * factor, at + (view.stop - at) * factor);
  }
  const move = (part) => view && show(view.start + part * (view.stop - view.start), view.stop + part * (view.stop - view.start));
  const reset = () => whole && show(whole.start, whole.stop);
  const timeAt = (offset) => view.start + ((offset - LABEL) / (canvas.clientWidth - LABEL)) * (view.stop - view.start);

  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event.offsetX));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.offsetX, ...view };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => (drag = null));
  canvas.addEventListener("dblclick", reset);
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const by = ((drag.x - event.offsetX) / (canvas.clientWidth - LABEL)) * (drag.stop - drag.start);
      show(drag.start + by, drag.stop + by);
      return;
    }
    const hit = hits.findLast((each) => each.left <= event.offsetX && event.offsetX <= each.right && each.top <= event.offsetY && event.offsetY < each.top + ROW);
    if (!hit) return hideTip();
    const about = Object.entries(hit.about || {}).map(([name, value]) => h("tr", {}, h("th", {}, name), h("td", {}, String(value))));
    showTip([h("p", {}, h("b", {}, hit.name), ` ${seconds(hit.seconds)}`), h("p", { class: "dim" }, `${hit.lane}, at ${seconds(answer.start + hit.start - whole.start)}${hit.number > 1 ? `; ${hit.number} spans too short to be drawn apart` : ""}`), h("table", {}, about)], event.clientX, event.clientY);
  });
  const resized = new ResizeObserver(paint);
  resized.observe(root);

  return {
    update,
    repaint() {
      paint();
      if (answer?.lanes.length) below.replaceChildren(key(answer), table(answer));
    },
    key(event) {
      const action = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: reset, ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2) }[event.key];
      action?.();
      return !!action;
    },
    leave() {
      resized.disconnect();
      clearTimeout(waiting);
    },
  };
}
