// The page of --report (megatron_2bw/tools/planner/tell/report_page.py).

import { heaviest, MEMORY, plot, stacks } from "./chart.js";
import { button, by, cell, copied, element } from "./dom.js";
import { Stack } from "./stack.js";
import { number } from "./why.js";

const { title, plans, timelines } = JSON.parse(by("report").textContent);
const CAUSES = {
  compute: "computing",
  tensor: "tensor parallelism's collectives",
  pipeline: "messages between stages",
  data: "gradients over replicas",
  update: "optimizer's step",
  bubble: "bubble",
};
// Colour and mark of a schedule, as on the page of schedules.
const SERIES = { "2bw": 0, "pipedream-flush": 4, gpipe: 5, "no-pipelining": 6, pipedream: 7, megatron: 8 };
const three = (rate) => (rate < 100 ? rate.toPrecision(3) : String(rate));
const sum = (split) => Object.values(split).reduce((one, other) => one + other, 0);

plans.forEach((plan, place) => {
  plan.rank = place + 1;
  plan.gib = heaviest(plan.memory);
  plan.full = (100 * plan.fullest[0]) / plan.fullest[1];
  plan.bubble = (100 * plan.split.bubble) / sum(plan.split);
});

/** name of a column: [its title, the value, how it is written] */
const COLUMNS = {
  rank: ["rank"],
  shown: ["schedule"],
  tensor: ["tensor ranks, t"],
  depth: ["stages, d"],
  width: ["replicas, w"],
  microbatch: ["microbatch, b"],
  microbatches: ["microbatches, m"],
  recompute: ["recompute"],
  rate: ["samples/s", three],
  bubble: ["bubble", (share) => `${share.toFixed(1)} %`],
  gib: ["GiB, heaviest stage", number],
};
const side = (name) => (typeof plans[0][name] === "string" ? { class: "left" } : {});
let sorted = { by: "rank", down: false };
let chosen = plans[0];

function sort(name) {
  sorted = { by: name, down: sorted.by === name ? !sorted.down : name === "rate" };
  table();
  by("plans").querySelector(`[data-by="${name}"]`).focus();
}

function compared(one, other) {
  const [a, b] = [one, other].map((plan) => plan[sorted.by] ?? Infinity);
  const less = typeof a === "string" ? a.localeCompare(b) : a === b ? 0 : a - b;
  return sorted.down ? -less : less;
}

function table() {
  const head = ([name, [label]]) => {
    const order = sorted.by === name ? (sorted.down ? "descending" : "ascending") : "none";
    const arrow = { ascending: " ▲", descending: " ▼", none: "" }[order];
    const sorting = button(label + arrow, () => sort(name), { "data-by": name });
    return element("th", { scope: "col", "aria-sort": order, ...side(name) }, sorting);
  };
  const row = (plan) => {
    const values = Object.entries(COLUMNS).map(([name, [, write = String]]) => cell(write(plan[name]), side(name)));
    const choose = button(plan === chosen ? "shown" : "show", () => choosing(plan), {
      "aria-pressed": plan === chosen,
      "aria-label": `Show ${plan.name}`,
    });
    return element("tr", plan.full > 100 ? { class: "soft" } : {}, ...values, cell(choose));
  };
  const rows = [...plans].sort(compared).map(row);
  const heads = element("tr", {}, ...Object.entries(COLUMNS).map(head), element("td", {}));
  const caption = element("caption", { class: "hidden" }, "Plans");
  by("plans").replaceChildren(
    element("table", {}, caption, element("thead", {}, heads), element("tbody", {}, ...rows)),
  );
}

function choosing(plan) {
  chosen = plan;
  table();
  show();
}

function show() {
  by("chosen").textContent = `${chosen.name}: ${three(chosen.rate)} samples/s, ${number(chosen.gib)} GiB`;
  by("flags").replaceChildren(
    button("Copy the flags", copied(chosen.flags)),
    element("pre", { class: "wrapped" }, chosen.flags),
  );
  by("memory").innerHTML = stacks({
    label: "Memory by stage",
    unit: "GiB a GPU",
    groups: [{ title: chosen.name, columns: chosen.memory }],
    kinds: MEMORY,
    limit: { y: chosen.allowed, name: "allowed" },
  });
  change({});
}

function front() {
  const near = plans.filter((plan) => plan.full <= 200);
  const points = (name) =>
    near
      .filter((plan) => plan.schedule === name)
      .map((plan) => [plan.full, plan.rate, `${plan.name}: ${three(plan.rate)} samples/s, ${number(plan.gib)} GiB`]);
  by("front").innerHTML = plot({
    label: "Throughput against memory, a mark per plan",
    x: "% of the memory that the fullest stage may take",
    y: "samples/s",
    lines: false,
    series: Object.entries(SERIES)
      .map(([name, index]) => ({ name, index, points: points(name) }))
      .filter((one) => one.points.length),
    limit: { x: 100, name: "allowed" },
  });
}

function splits() {
  const shown = plans.slice(0, ranked).map((plan) => plan.split);
  const [unit, each] = Math.max(...shown.map(sum)) < 1000 ? ["milliseconds", 1] : ["seconds", 1000];
  const column = (split) =>
    Object.fromEntries(Object.entries(CAUSES).map(([cause, name]) => [name, split[cause] / each]));
  by("splits").innerHTML = stacks({
    label: "Time by cause",
    unit: `${unit} per sample`,
    groups: [{ title: "", columns: shown.map(column) }],
    kinds: Object.values(CAUSES),
    column: "rank",
    first: 1,
  });
}

const state = { colourBy: "batch", critical: false };
const stack = new Stack(by("timeline"), { change, unit: "Times are seconds." });
function change(part) {
  Object.assign(state, part, { microbatches: chosen.microbatches });
  const timeline = timelines[plans.indexOf(chosen)];
  by("timeline").hidden = !timeline;
  stack.show(timeline ? { [chosen.name]: timeline.shown } : {}, state);
  by("window").textContent = !timeline
    ? "Not drawn: it is too long, or the plan has no rank."
    : timeline.begin
      ? `A part around the end of the first batch, which starts at ${number(timeline.begin)} s.`
      : "The first two batches.";
}

document.title = title;
by("title").textContent = title;
by("best").textContent =
  `Best: ${plans[0].name}, ${three(plans[0].rate)} samples/s, ` +
  `${plans[0].fullest.map(number).join(" GiB of ")} GiB allowed.`;
const more = plans.length - ranked;
by("counted").textContent =
  `Plans of the search, which have a rank: ${ranked}. ` +
  (more ? `Below them, the fastest of each schedule: ${more} more. ` : "") +
  "A column's title sorts the table.";
table();
show();
front();
splits();
