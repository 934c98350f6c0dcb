// A timeline from its JSON (docs/playground/answers.py): its events, its drawing, and the event at a point.
// Nothing here computes a start or an end.

export const LEFT = 62; // pixels of the stages' names
export const AXIS = 22; // pixels of the time axis

// By batch or weight version, in turn: [forward, its ink, backward, its ink]. The pairs differ in lightness too.
export const COLOURS = [
  ["#a6d3f2", "#000", "#0072b2", "#fff"],
  ["#fbd9a5", "#000", "#b85c00", "#fff"],
  ["#bfe5d9", "#000", "#00664c", "#fff"],
];
const ACTION = /^([FBRS])(\d+)@(\d+)(?:\.(\d+))?$/;

/** The events of an answer by stage, its waits and its critical path. */
export function read(answer) {
  const rows = answer.actions.map((text, stage) =>
    text.split(" ").map((word, place) => {
      const [, kind, number, version, chunk] = ACTION.exec(word);
      const [start, end] = [answer.starts[stage][place], answer.ends[stage][place]];
      return { stage, place, word, kind, number: +number, version: +version, chunk: +(chunk ?? 0), start, end };
    }),
  );
  answer.waits?.forEach((waits, stage) => {
    for (const [place, seconds, other, at, queued] of waits)
      rows[stage][place].wait = { seconds, cause: rows[other][at], queued };
  });
  for (const [stage, place] of answer.critical ?? []) rows[stage][place].critical = true;
  const chunks = 1 + rows[0].reduce((most, event) => Math.max(most, event.chunk), 0);
  return { rows, makespan: answer.makespan, late: answer.late, chunks };
}

/** Pixels of a stage's row; fewer for many stages. */
export function rowHeight(stages) {
  return Math.max(9, Math.min(34, Math.floor(420 / stages)));
}

export function height(timeline) {
  return timeline.rows.length * rowHeight(timeline.rows.length) + AXIS;
}

/**
 * Draw the part of `timeline` between view.from and view.to, `width` pixels wide.
 * options: microbatches (of a batch), colourBy "batch" or "version", critical, selected (an event), now (playback),
 * theme { ink, ground, idle, accent }
 */
export function draw(pen, timeline, width, view, options) {
  const row = rowHeight(timeline.rows.length);
  const x = (time) => LEFT + ((time - view.from) / (view.to - view.from)) * (width - LEFT);
  const shown = { ...options, row, x, width, chunks: timeline.chunks, late: timeline.late };
  timeline.rows.forEach((events, stage) => {
    const top = stage * row;
    pen.rect(LEFT, top + 1, width - LEFT, row - 2, options.theme.idle);
    const visible = events.filter((event) => event.end >= view.from && event.start <= view.to);
    for (const event of visible) if (event.kind !== "S") drawAction(pen, event, top, shown);
    for (const event of visible) if (event.kind === "S") drawStep(pen, event, top, shown);
    pen.rect(0, top, LEFT, row, options.theme.ground);
    pen.text(LEFT - 6, top + row / 2, `stage ${stage}`, options.theme.ink, Math.min(12, row), "end");
  });
  if (options.selected) drawCause(pen, options.selected, shown);
  drawAxis(pen, timeline, view, shown);
  if (options.now !== undefined && options.now >= view.from && options.now <= view.to)
    pen.line(x(options.now), 0, x(options.now), timeline.rows.length * row, options.theme.accent, 1.5);
}

function span(event, { x, width }) {
  const left = Math.max(x(event.start), LEFT);
  return [left, Math.max(Math.min(x(event.end), width) - left, 0)];
}

function shade(event, { now, critical }) {
  if (now !== undefined && event.start >= now) return 0.12;
  return critical && !event.critical ? 0.25 : 1;
}

function drawAction(pen, event, top, shown) {
  const [left, across] = span(event, shown);
  if (!(event.end > event.start)) return;
  const alpha = shade(event, shown);
  if (["P", "R", "wait"].includes(event.kind)) {
    pen.rect(left, top + shown.row * 0.3, across, shown.row * 0.4, shown.theme.update, alpha);
    return;
  }
  const batch = shown.colourBy === "version" ? event.version : Math.floor(event.number / shown.microbatches);
  const colours = COLOURS[batch % COLOURS.length];
  const [fill, ink] = event.kind === "F" ? colours : colours.slice(2);
  const gap = across > 3 ? 1 : 0;
  pen.rect(left, top + 1, across - gap, shown.row - 2, shown.theme.ground);
  pen.rect(left, top + 1, across - gap, shown.row - 2, fill, alpha);
  const text = event.number + (shown.chunks > 1 ? String.fromCharCode(97 + event.chunk) : "");
  if (shown.row < 10 || across < 6.2 * text.length + 3) return;
  const both = shown.row >= 26 && across >= 23;
  const label = alpha < 1 ? shown.theme.ink : ink;
  const middle = left + across / 2;
  pen.text(middle, top + shown.row * (both ? 0.34 : 0.52), text, label, 11, "middle", alpha);
  if (both) pen.text(middle, top + shown.row * 0.74, `W${event.version}`, label, 9, "middle", alpha);
}

/** A step's end as a line; where it holds up the stage, its time as a bar. */
function drawStep(pen, event, top, shown) {
  const alpha = shade(event, shown);
  const [left, across] = span(event, shown);
  if (!shown.late && across > 0)
    pen.rect(left, top + shown.row * 0.3, across, shown.row * 0.4, shown.theme.update, alpha);
  const x = shown.x(event.end);
  if (x >= LEFT && x <= shown.width + 1) pen.line(x, top + 1, x, top + shown.row - 1, shown.theme.ink, 2, alpha);
}

function drawCause(pen, event, shown) {
  const { row, x, theme, width } = shown;
  const middle = (stage) => stage * row + row / 2;
  const [left, across] = span(event, shown);
  if (event.start <= event.end && left < width)
    pen.frame(left, event.stage * row + 1, Math.max(across, 3), row - 2, theme.accent, 2.5);
  if (!event.wait) return;
  const { cause } = event.wait;
  const from = cause.kind === "R" ? cause.start : cause.end;
  const to = event.kind === "S" ? event.end : event.start;
  const inside = (time) => Math.max(x(time), LEFT);
  pen.line(inside(from), middle(cause.stage), inside(to), middle(event.stage), theme.accent, 2);
}

function drawAxis(pen, timeline, view, { x, row, theme, width }) {
  const top = timeline.rows.length * row;
  const step = tick((view.to - view.from) / Math.max((width - LEFT) / 70, 1));
  for (let k = Math.ceil(view.from / step); k * step <= view.to * (1 + 1e-9); k++) {
    pen.line(x(k * step), top, x(k * step), top + 4, theme.ink, 1);
    const near = x(k * step) > width - 14;
    pen.text(
      near ? width - 1 : x(k * step),
      top + 13,
      Number((k * step).toPrecision(6)),
      theme.ink,
      11,
      near ? "end" : "middle",
    );
  }
}

/** The least of 1, 2, 5 times a power of ten that is not below `least`. */
export function tick(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((k) => k * power).find((step) => step >= least * (1 - 1e-9));
}

/** { stage, event } at a point: the action, or the one that ends the idle time there; event is undefined after the last. */
export function at(timeline, px, py, width, view) {
  const stage = Math.floor(py / rowHeight(timeline.rows.length));
  if (px < LEFT || stage < 0 || stage >= timeline.rows.length) return null;
  const time = view.from + ((px - LEFT) / (width - LEFT)) * (view.to - view.from);
  const longer = timeline.rows[stage].filter((event) => event.end > event.start);
  const own = longer.filter((event) => !(timeline.late && event.kind === "S"));
  const event = own.find((event) => event.end > time) ?? longer.find((event) => event.end > time);
  return { stage, time, event, idle: !event || event.start > time };
}
