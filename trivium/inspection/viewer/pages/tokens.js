// A rollout's tokens as text, shaded by one of their values.
import { h, hideTip, inlined, show, showTip, theme, variable } from "./lib.js";

// Every value that may be known of a token: the same names and order as the server's.
export const VALUES = [
  ["advantages", "advantage", "diverging", "set run.keep: tokens: it does not follow from the rewards alone"],
  ["log_prob", "log-prob, engine", "low", ""],
  ["old_log_prob", "log-prob, trainer", "low", "set run.keep: tokens; algorithm.old_log_prob"],
  ["ref_log_prob", "log-prob, reference", "low", "set run.keep: tokens, and algorithm.kl.coef"],
  ["mismatch", "trainer / engine", "around1", "set run.keep: tokens"],
  ["update_log_prob", "log-prob at the update", "low", "set run.keep: tokens"],
  ["ratio", "ratio (update / old)", "around1", "set run.keep: tokens"],
  ["clipped", "clipped", "flag", "set run.keep: tokens, and a loss that clips"],
  ["update_entropy", "entropy", "high", "set run.keep: tokens"],
  ["returns", "return", "diverging", "set run.keep: tokens, and a critic"],
  ["values", "value", "diverging", "set run.keep: tokens, and a critic"],
  ["response_mask", "mask", "flag", ""],
  ["policy_version", "policy version", "version", ""],
];
const KIND = Object.fromEntries(VALUES.map(([name, , kind]) => [name, kind]));
export const titleOf = (name) => VALUES.find(([each]) => each === name)?.[1] || name;
export const lackingOf = (name) => VALUES.find(([each]) => each === name)?.[3] || "";

// The largest and the smallest of a value over these rollouts, of sampled tokens.
export function domain(rollouts, name) {
  let least = Infinity, most = -Infinity;
  for (const rollout of rollouts) for (const sequence of rollout.sequences) for (const value of sequence.values[name] || []) {
    if (value === null) continue;
    least = Math.min(least, value);
    most = Math.max(most, value);
  }
  return least > most ? null : [least, most];
}

const COLOURS = {
  light: { high: [217, 95, 2], low: [33, 102, 172], one: [124, 58, 170] },
  dark: { high: [255, 150, 70], low: [90, 165, 255], one: [190, 130, 245] },
};
const tint = ([r, g, b], strength) => `rgba(${r}, ${g}, ${b}, ${(0.72 * Math.min(1, Math.max(0, strength))).toFixed(3)})`;

// The background of a token, given the range of the value.
export function shade(name, value, range) {
  if (value === null || value === undefined || !range) return "";
  const palette = COLOURS[theme()], [least, most] = range;
  const kind = KIND[name] || "diverging";
  if (kind === "diverging") return tint(value < 0 ? palette.low : palette.high, Math.abs(value) / (Math.max(-least, most) || 1));
  if (kind === "around1") {
    const far = Math.max(Math.abs(Math.log(least || 1e-9)), Math.abs(Math.log(most || 1e-9)), 1e-9);
    const away = Math.log(value || 1e-9) / far;
    return tint(away < 0 ? palette.low : palette.high, Math.abs(away));
  }
  if (kind === "low") return tint(palette.one, value / (least || -1));
  if (kind === "high") return tint(palette.one, value / (most || 1));
  if (kind === "flag") return value ? tint(palette.one, 0.6) : "";
  const turn = (value * 137.5) % 360;
  return `hsla(${turn}, 65%, ${theme() === "dark" ? 55 : 60}%, 0.45)`;
}

// What the colours mean: a few samples from the smallest to the largest value.
export function scale(name, range) {
  if (!range) return h("span", { class: "dim" }, `${titleOf(name)}: not recorded${lackingOf(name) ? ` (${lackingOf(name)})` : ""}`);
  const kind = KIND[name] || "diverging";
  const [least, most] = range;
  let stops = [least, most];
  if (kind === "diverging") stops = [-Math.max(-least, most), 0, Math.max(-least, most)];
  if (kind === "around1") {
    const far = Math.exp(Math.max(Math.abs(Math.log(least || 1e-9)), Math.abs(Math.log(most || 1e-9))));
    stops = [1 / far, 1, far];
  }
  if (kind === "flag") stops = [0, 1];
  if (kind === "version" && least === most) stops = [least];
  return h("span", { class: "scale" }, stops.map((value) => {
    const sample = h("i", {}, show(value));
    sample.style.backgroundColor = shade(name, value, kind === "diverging" ? [stops[0], stops.at(-1)] : range);
    return sample;
  }));
}

// The text of a sequence: context and turns as segments, every token an element that knows its place.
// `whole` shows the prompt too; `picked` is [sequence, token] of the token that the address names.
export function transcript(rollout, { run, name, range, whole, picked, pick }) {
  const box = h("div", { class: "transcript", tabIndex: 0, role: "group", "aria-label": "Tokens" });
  const elements = [];
  const several = rollout.turns > 1;
  rollout.sequences.forEach((sequence, number) => {
    if (sequence.fork) box.append(started(sequence.fork, sequence.turns[0].participant));
    let position = 0;
    for (const turn of sequence.turns) {
      // A sequence that starts later shows its prompt from the first token that differs.
      const from = position || whole || !sequence.fork ? position : Math.min(sequence.fork.at, turn.start);
      if (turn.start > from && (whole || position || sequence.fork)) box.append(...segment(position ? "environment" : "prompt", sequence, number, from, turn.start, turn));
      box.append(...segment("assistant", sequence, number, turn.start, turn.stop, turn));
      position = turn.stop;
    }
    if (!sequence.turns.length) box.append(...segment("expert", sequence, number, 0, sequence.tokens.length, null));
  });

  function segment(role, sequence, number, start, stop, turn) {
    const own = role === "assistant" || role === "expert";
    const text = h("div", { class: `segment ${own ? "own" : "context"}` });
    const media = (turn?.media || []).filter((item) => item.span && item.span[0] >= start && item.span[0] < stop);
    for (let t = start; t < stop; t++) {
      const item = media.find((each) => each.span[0] <= t && t < each.span[1]);
      if (item) {
        if (t === item.span[0]) text.append(image(run, item));
        continue;
      }
      const token = h("span", { class: "t" }, written(sequence.text[t]));
      token.place = [number, t];
      const value = sequence.values[name]?.[t];
      const background = shade(name, value, range);
      if (background) token.style.backgroundColor = background;
      if (sequence.values.response_mask[t] === 0 && own) token.classList.add("masked");
      if (sequence.fork?.at === t) token.classList.add("fork");
      if (picked && picked[0] === number && picked[1] === t) token.classList.add("picked");
      elements.push(token);
      text.append(token);
    }
    const more = own && turn ? [several ? ` · turn ${turn.number + 1}` : null, turn.participant ? ` · ${turn.participant}` : null, h("span", { class: turn.stop_reason === "eos" ? "dim" : "warn" }, ` · ${turn.stop_reason}`),
      turn.reward ? h("span", { class: "dim" }, `, reward ${show(turn.reward)}`) : null] : [];
    const calls = own && turn ? [...turn.text.matchAll(/<tool_call>([^]*?)<\/tool_call>/g)].map((call) => toolCall(call[1])) : [];
    return [h("p", { class: "role" }, role, more), text, ...calls];
  }

  function told(token) {
    const [number, t] = token.place;
    return facts(rollout.sequences[number], t);
  }
  box.addEventListener("mousemove", (event) => {
    if (event.target.place) showTip(told(event.target), event.clientX, event.clientY);
    else hideTip();
  });
  box.addEventListener("mouseleave", hideTip);
  box.addEventListener("click", (event) => event.target.place && select(event.target));
  box.addEventListener("keydown", (event) => {
    const at = elements.findIndex((each) => each.classList.contains("picked"));
    const to = { ArrowRight: at + 1, ArrowLeft: Math.max(0, at - 1), Home: 0, End: elements.length - 1 }[event.key];
    if (to === undefined || event.ctrlKey || event.metaKey || event.altKey || !elements[to]) return;
    event.preventDefault();
    event.stopPropagation();
    select(elements[to]);
  });

  function select(token) {
    elements.forEach((each) => each.classList.toggle("picked", each === token));
    token.scrollIntoView({ block: "nearest" });
    const { left, bottom } = token.getBoundingClientRect();
    showTip(told(token), left, bottom - 10);
    pick?.(token.place);
  }
  return box;
}

// Why a turn does not continue the sequence before it.
function started(fork, participant) {
  const token = (text) => (text === null ? "the end" : JSON.stringify(text));
  return h("p", { class: "fork" }, h("b", {}, participant ? `another sequence, of ${participant}` : "another sequence"),
    `: ${fork.reason}; token ${fork.at} is `, h("code", {}, token(fork.sent)), ", and ", h("code", {}, token(fork.known)), ` in turn ${fork.earlier + 1}`);
}

const written = (text) => (text === "" ? "\u200b" : text.replace(/\n/g, "↵\n"));

function toolCall(text) {
  try {
    const call = JSON.parse(text);
    return h("p", { class: "call" }, "tool call ", h("code", {}, `${call.name}(${JSON.stringify(call.arguments ?? call.parameters ?? {})})`));
  } catch {
    return h("p", { class: "call warn" }, "tool call that is not JSON");
  }
}

export function image(run, item) {
  const picture = item.mime.startsWith("image/");
  const source = inlined ? inlined.media[item.sha256] : `media/${run}/${item.sha256}`;
  if (!source) return h("span", { class: "dim" }, `${item.mime} ${item.sha256.slice(0, 12)}`);
  return picture ? h("img", { src: source, alt: `${item.mime}, ${item.sha256.slice(0, 12)}`, loading: "lazy" })
    : h("a", { href: source }, item.mime);
}

// Everything known of a token, as a table.
export function facts(sequence, t) {
  const names = [...VALUES.map(([name]) => name), ...Object.keys(sequence.values).filter((name) => !(name in KIND))];
  const rows = names.filter((name) => name in sequence.values).map((name) => {
    const value = sequence.values[name][t];
    return h("tr", { data: { value: name } }, h("th", {}, titleOf(name)), h("td", {}, value === null ? "–" : String(value)));
  });
  const lacking = VALUES.filter(([name]) => !(name in sequence.values));
  const text = sequence.text[t] === "" ? "(part of the character before)" : JSON.stringify(sequence.text[t]);
  return [h("p", {}, h("b", {}, text), h("span", { class: "dim" }, ` token ${sequence.tokens[t]}, position ${t}`)),
    h("table", {}, rows),
    lacking.length ? h("p", { class: "dim small" }, `not recorded: ${lacking.map(([, title]) => title).join(", ")}`) : null].filter(Boolean);
}

// The control that chooses what tokens are shaded by.
export function shadeSelect(current, rollouts, choose) {
  const has = (name) => rollouts.some((rollout) => rollout.sequences.some((sequence) => name in sequence.values));
  const others = new Set(rollouts.flatMap((rollout) => rollout.sequences.flatMap((sequence) => Object.keys(sequence.values))));
  const names = [...VALUES.map(([name]) => name), ...[...others].filter((name) => !(name in KIND))];
  const select = h("select", { "aria-label": "Shade tokens by", onchange: () => choose(select.value) },
    h("option", { value: "none", selected: current === "none" }, "nothing"),
    names.map((name) => h("option", { value: name, selected: name === current, disabled: !has(name), title: has(name) ? "" : lackingOf(name) },
      titleOf(name) + (has(name) ? "" : " (not recorded)"))));
  return select;
}
