// The page of a measured run (megatron_2bw/tools/timelines/measured.py).

import { by, cell, element } from "./dom.js";
import { Stack } from "./stack.js";
import { number } from "./why.js";

const { title, microbatches, medians, timelines } = JSON.parse(by("trace").textContent);
const state = { microbatches, colourBy: "batch", critical: false };
const TITLES = { measured: "Measured", simulated: "Simulated: the same lists, with each stage's median times" };

by("about").textContent =
  `The run's ${title}, and the same lists of actions with each stage's median times. ` +
  "What differs between the two is the spread of the times, and work outside of the lists.";
const stack = new Stack(by("timelines"), { title: (name) => TITLES[name], change, unit: "Times are milliseconds." });
change({});

function change(part) {
  Object.assign(state, part);
  stack.show(timelines, state);
}

const head = (name) => element("th", { scope: "col" }, name);
const stages = medians.forward.map((_, stage) => head(`stage ${stage}`));
const row = ([name, values]) =>
  element("tr", {}, element("th", { scope: "row" }, name), ...values.map((value) => cell(number(value))));
const rows = {
  forward: medians.forward,
  backward: medians.backward,
  "message to the next": medians.message.slice(0, -1),
};
by("medians").append(
  element("table", {}, element("tr", {}, element("td", {}), ...stages), ...Object.entries(rows).map(row)),
);
