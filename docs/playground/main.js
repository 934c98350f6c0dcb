// The page: asks for what the state names, and shows the answers. All state is in the URL's hash.

import { plot } from "./chart.js";
import { bars, table } from "./compare.js";
import { button, by, element } from "./dom.js";
import { Editor } from "./edit.js";
import { exports } from "./export.js";
import { build, fill } from "./form.js";
import { fromHash, request, SCHEDULES, toHash } from "./parameters.js";
import { Python } from "./python.js";
import { Stack } from "./stack.js";

const { presets, grid } = JSON.parse(by("first").textContent);
const python = new Python(grid, say);
const form = by("parameters");
const title = (name) => SCHEDULES[name] ?? name;
const stack = new Stack(by("timelines"), { title, change: (part) => change(part) });
const editor = new Editor(
  by("edit"),
  (asked) => python.ask(asked),
  stack,
  (edit) => change({ edit }),
);

let state = fromHash(location.hash);
let turn = 0;

function say(text, wrong = false) {
  by("status").textContent = text;
  by("status").className = wrong ? "wrong" : "soft";
}

/** Take over a part of a state that a person changed, and show it. */
function change(part) {
  state = { ...state, ...part };
  history.replaceState(null, "", `#${toHash(state)}`);
  show();
}

/** Ask for one kind of answer; undefined if a person has changed the state meanwhile, or if it cannot be answered. */
async function ask(what, mine, more = {}) {
  const answer = await python.ask({ ask: what, ...request(state), schedules: state.schedules, ...more });
  if (mine !== turn) return undefined;
  if (answer.error) say(answer.error, true);
  return answer.error ? undefined : answer;
}

async function show() {
  const mine = ++turn;
  fill(form, state);
  if (!state.schedules.length) return say("Choose at least one schedule.", true);
  const begun = performance.now();
  const drawn = await ask("timelines", mine);
  if (!drawn) return;
  say("");
  stack.show(drawn.timelines, state);
  requestAnimationFrame(() => performance.measure("timelines", { start: begun })); // after the drawing
  editor.show(drawn.timelines, state);
  const figures = await ask("figures", mine);
  if (!figures) return;
  stack.describe(figures.figures);
  by("figures").replaceChildren(table(figures.figures, state.stages));
  by("memory-of").textContent =
    `The planner's bytes on one GPU a stage: ${state.model}, ${state.precision}, microbatches of ${state.microbatch}, recompute ${state.recompute}.`;
  by("memory").innerHTML = bars(figures.figures);
  exports(by("export"), { python, stack, state, request: request(state), figures: figures.figures });
  await curve(mine);
}

const OVER = { microbatches: "microbatches a batch, m", transfer: "time of a message" };

/** The curves, point by point: what a person changes meanwhile is computed before the next point. */
async function points(mine) {
  let found;
  for (let at = 0; at < (found?.x.length ?? 1); at++) {
    const one = await ask("curve", mine, { over: state.over, at });
    if (!one) return undefined;
    found ??= { x: one.x, curves: Object.fromEntries(state.schedules.map((name) => [name, []])) };
    for (const name of state.schedules) found.curves[name].push(...one.curves[name]);
  }
  return found;
}

async function curve(mine) {
  const choice = ([over, label]) =>
    button(`over ${label}`, () => change({ over }), { "aria-pressed": state.over === over });
  by("over").replaceChildren(...Object.entries(OVER).map(choice));
  const found = python.knows({ ask: "curve", ...request(state), over: state.over })
    ? await ask("curve", mine, { over: state.over })
    : await points(mine);
  if (!found) return;
  const names = Object.keys(SCHEDULES);
  by("curve").innerHTML = plot({
    label: `Throughput over ${OVER[state.over]}, a line per schedule`,
    x: OVER[state.over],
    y: "microbatches per unit of time",
    series: Object.entries(found.curves).map(([name, rates]) => ({
      name: SCHEDULES[name],
      index: names.indexOf(name),
      points: found.x.map((value, k) => [value, rates[k]]),
    })),
  });
}

build(form, presets, change);
form.addEventListener("pointerdown", () => python.load(), { once: true });
form.addEventListener("focusin", () => python.load(), { once: true });
addEventListener("hashchange", () => {
  state = fromHash(location.hash);
  show();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => stack.span.changed());

/** The rest of the grid, as a script: a page from a file can load no JSON. */
function loadGrid() {
  return new Promise((resolve) => {
    const script = element("script", { src: "grid.js", onload: resolve, onerror: resolve });
    document.head.append(script);
  }).then(() => Object.assign(python.grid, window.grid));
}

// The page's first answer needs no more than `first`; an answer that is not in it waits for the rest.
python.rest = location.hash ? loadGrid() : show().then(loadGrid);
if (location.hash) show();
