// The figures of the schedules side by side: a table, columns of bytes, and the timelines as tables.

import { stacks } from "./chart.js";
import { element } from "./form.js";
import { SCHEDULES } from "./parameters.js";
import { number } from "./why.js";

const GIB = 2 ** 30;
const KINDS = ["weights", "gradients", "optimizer", "activations", "logits", "buffers"];
const total = (stage) => KINDS.reduce((sum, kind) => sum + stage[kind], 0);
const cell = (value) => element("td", {}, value);

/** Equal values as one, others by stage. */
const byStage = (values) => (new Set(values).size === 1 ? number(values[0]) : values.map(number).join(" "));

export function table(figures, stages) {
  const ran = Object.values(figures).filter((found) => !found.error);
  const base = figures["pipedream-flush"]?.throughput ?? Math.min(...ran.map((found) => found.throughput));
  const than = figures["pipedream-flush"]?.throughput ? "1F1B" : "the slowest";
  const names = ["schedule", "bubble", "time of a batch", "throughput", `against ${than}`, "weight versions by stage"];
  names.push("activations in flight by stage", "GiB, heaviest stage");
  const rows = Object.entries(figures).map(([name, found]) => {
    const head = element("th", { scope: "row" }, SCHEDULES[name]);
    if (found.error) return element("tr", {}, head, element("td", { colspan: 7, class: "wrong" }, found.error));
    const heaviest = found.bytes ? number(Math.max(...found.bytes.map(total)) / GIB) : found.reason;
    const values = [`${(100 * found.bubble).toFixed(1)} %`, number(found.seconds), number(found.throughput)];
    values.push(
      `${(found.throughput / base).toFixed(2)} ×`,
      byStage(found.versions),
      byStage(found.in_flight),
      heaviest,
    );
    return element("tr", {}, head, ...values.map(cell));
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
      columns: bytes.map((stage) => Object.fromEntries(KINDS.map((kind) => [kind, stage[kind] / GIB]))),
    }));
  const reason = Object.values(figures).find((found) => found.reason)?.reason;
  if (!groups.length) return `<p class="soft">No bytes: ${reason ?? "no schedule can run"}.</p>`;
  return stacks({ label: "Memory by stage", unit: "GiB", groups, kinds: KINDS });
}

/** Each timeline as a table: a row per stage, its actions with their times. Filled when it is opened. */
export function tables(host, answers) {
  const fill = () =>
    host.replaceChildren(
      ...Object.entries(answers)
        .filter(([, answer]) => !answer.error)
        .map(([name, answer]) => {
          const rows = answer.actions.map((text, stage) => {
            const words = text.split(" ");
            const times = words.map(
              (word, k) => `${word} ${number(answer.starts[stage][k])}–${number(answer.ends[stage][k])}`,
            );
            return element("tr", {}, element("th", { scope: "row" }, `stage ${stage}`), ...times.map(cell));
          });
          return element(
            "div",
            { class: "scroll" },
            element("table", {}, element("caption", {}, SCHEDULES[name]), ...rows),
          );
        }),
    );
  const details = host.parentElement;
  details.ontoggle = () => details.open && fill();
  if (details.open) fill();
}
