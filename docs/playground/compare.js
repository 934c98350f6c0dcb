// The figures of the schedules side by side: a table, and columns of bytes.

import { heaviest, MEMORY, stacks } from "./chart.js";
import { cell, element } from "./dom.js";
import { SCHEDULES } from "./parameters.js";
import { number } from "./why.js";

const GIB = 2 ** 30;

/** Equal values as one, others by stage. */
const byStage = (values) => (new Set(values).size === 1 ? number(values[0]) : values.map(number).join(" "));

export function table(figures, stages) {
  const ran = Object.values(figures).filter((found) => !found.error);
  const base = figures["pipedream-flush"]?.throughput ?? Math.min(...ran.map((found) => found.throughput));
  const than = figures["pipedream-flush"]?.throughput ? "1F1B" : "the slowest";
  const names = ["schedule", "bubble", "time of a batch", "throughput", `against ${than}`, "weight versions by stage"];
  names.push("activations in flight by stage", "GiB, heaviest stage");
  const rows = Object.entries(figures).map(([name, found]) => {
    const head = element("th", { scope: "row" }, SCHEDULES[name], element("small", {}, found.summary ?? ""));
    if (found.error) return element("tr", {}, head, element("td", { colspan: 7, class: "wrong" }, found.error));
    const most = found.bytes ? number(heaviest(found.bytes) / GIB) : found.reason;
    const values = [`${(100 * found.bubble).toFixed(1)} %`, number(found.seconds), number(found.throughput)];
    values.push(`${(found.throughput / base).toFixed(2)} ×`, byStage(found.versions), byStage(found.in_flight), most);
    return element("tr", {}, head, ...values.map((value) => cell(value)));
  });
  const head = element("tr", {}, ...names.map((name) => element("th", { scope: "col" }, name)));
  const caption = element("caption", { class: "hidden" }, `Schedules with ${stages} stages`);
  return element("table", {}, caption, element("thead", {}, head), element("tbody", {}, ...rows));
}

/** Columns of GiB, a group per schedule. */
export function bars(figures) {
  const groups = Object.entries(figures)
    .filter(([, found]) => found.bytes)
    .map(([name, { bytes }]) => ({
      title: SCHEDULES[name],
      columns: bytes.map((stage) => Object.fromEntries(MEMORY.map((kind) => [kind, stage[kind] / GIB]))),
    }));
  const reason = Object.values(figures).find((found) => found.reason)?.reason;
  if (!groups.length) return `<p class="soft">No bytes: ${reason ?? "no schedule can run"}.</p>`;
  return stacks({ label: "Memory by stage", unit: "GiB", groups, kinds: MEMORY });
}
