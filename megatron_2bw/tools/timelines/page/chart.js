// Charts as SVG text: lines or points over two axes, and stacked columns. Inks come from page.css, colours are after Okabe and Ito.

import { escaped } from "./pens.js";
import { tick } from "./timeline.js";
import { number } from "./why.js";

const W = 640;
const H = 320;
const PLOT = { left: 58, right: 16, top: 14, bottom: 44 };
const MARKS = ["circle", "square", "triangle", "diamond", "cross"];
const SERIES = "#d55e00 #e69f00 #cc79a7 #b3922b #0072b2 #009e73 #8d959e #7a5ea8 #3fa0d8".split(" ");
const KINDS = "#0072b2 #56b4e9 #009e73 #e69f00 #cc79a7 #8d959e".split(" ");

/** The parts of a stage's memory, and the bytes of the stage that has the most. */
export const MEMORY = ["weights", "gradients", "optimizer", "activations", "logits", "buffers"];
export const heaviest = (stages) =>
  Math.max(...stages.map((stage) => MEMORY.reduce((sum, kind) => sum + stage[kind], 0)));

const coloured = (index) => `fill="${SERIES[index % 9]}" stroke="${SERIES[index % 9]}"`;

/** A mark of a series in its colour, by its index; lines of the same colour differ in their marks. */
function mark(index, x, y, title) {
  const r = 4;
  const shapes = {
    circle: `<circle cx="${x}" cy="${y}" r="${r}"/>`,
    square: `<rect x="${x - r}" y="${y - r}" width="${2 * r}" height="${2 * r}"/>`,
    triangle: `<path d="M${x} ${y - r - 1}l${r + 1} ${2 * r}h${-2 * r - 2}z"/>`,
    diamond: `<path d="M${x} ${y - r - 1}l${r + 1} ${r + 1}l${-r - 1} ${r + 1}l${-r - 1} ${-r - 1}z"/>`,
    cross: `<path d="M${x - r} ${y - r}l${2 * r} ${2 * r}m0 ${-2 * r}l${-2 * r} ${2 * r}" class="stroked"/>`,
  };
  const shape = shapes[MARKS[index % MARKS.length]];
  return `<g ${coloured(index)}>${title ? `<title>${escaped(title)}</title>` : ""}${shape}</g>`;
}

/** Ticks from 0 to at least `most`, about `count` of them. */
function ticks(most, count) {
  const step = tick(most / count || 1);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, k) => k * step);
}

/** A value of the vertical axis: a line across the chart, and the number, which ends at `x`. */
const level = (value, y, from, x, to) =>
  `<line x1="${from}" x2="${to}" y1="${y}" y2="${y}" class="grid"/>` +
  `<text x="${x}" y="${y}" text-anchor="end" dominant-baseline="central">${number(value)}</text>`;

/**
 * Lines, or points without `lines`, over axes that start at 0.
 * series: [{ name, points: [[x, y or null, title]], index }]; limit: { x, name }
 */
export function plot({ label, x, y, series, lines = true, limit }) {
  const all = series.flatMap((one) => one.points.filter((point) => point[1] !== null));
  const most = [0, 1].map((k) => Math.max(...all.map((point) => point[k]), k === 0 && limit ? limit.x * 1.05 : 0) || 1);
  const px = (value) => PLOT.left + (value / most[0]) * (W - PLOT.left - PLOT.right);
  const py = (value) => H - PLOT.bottom - (value / (most[1] * 1.05)) * (H - PLOT.bottom - PLOT.top);
  const grid = [
    ...ticks(most[0], 8).map((v) => `<text x="${px(v)}" y="${H - 26}" text-anchor="middle">${number(v)}</text>`),
    ...ticks(most[1], 5).map((v) => level(v, py(v), PLOT.left, PLOT.left - 6, W - PLOT.right)),
    `<text x="${(PLOT.left + W) / 2}" y="${H - 6}" text-anchor="middle">${escaped(x)}</text>`,
    `<text transform="translate(12 ${(H - PLOT.bottom) / 2}) rotate(-90)" text-anchor="middle">${escaped(y)}</text>`,
  ];
  if (limit)
    grid.push(`<line x1="${px(limit.x)}" x2="${px(limit.x)}" y1="${PLOT.top}" y2="${H - PLOT.bottom}" class="limit"/>`);
  const drawn = series.map((one, place) => {
    const index = one.index ?? place;
    const points = one.points.filter((point) => point[1] !== null);
    const way = points.map((point) => `${px(point[0]).toFixed(1)},${py(point[1]).toFixed(1)}`).join(" ");
    const line = lines ? `<polyline points="${way}" class="line" ${coloured(index)}/>` : "";
    const title = (point) => point[2] ?? `${one.name}: ${number(point[1])} at ${number(point[0])}`;
    return line + points.map((point) => mark(index, px(point[0]), py(point[1]), title(point))).join("");
  });
  const names = series.map((one, place) => legend(one.name, mark(one.index ?? place, 7, 7)));
  if (limit) names.push(legend(limit.name, `<line x1="7" x2="7" y1="0" y2="14" class="limit"/>`));
  return figure(label, W, H, [...grid, ...drawn]) + `<p class="legend">${names.join("")}</p>`;
}

const legend = (name, shape) =>
  `<span><svg width="14" height="14" aria-hidden="true" class="chart">${shape}</svg>${escaped(name)}</span>`;

function figure(label, width, height, parts) {
  const box = `viewBox="0 0 ${width} ${height}" style="max-width:${width * 1.2}px"`;
  return `<svg class="chart plot" role="img" aria-label="${escaped(label)}" ${box}>${parts.join("")}</svg>`;
}

/**
 * Groups of stacked columns on one scale.
 * groups: [{ title, columns: [{ part: value }] }]; kinds: names of parts, from the bottom
 * limit: { y: a value for each column, name }
 * column: what a column is; first: the number of the first
 */
export function stacks({ label, unit, groups, kinds, limit, column: named = "stage", first = 0 }) {
  const total = (column) => kinds.reduce((sum, kind) => sum + column[kind], 0);
  const most = Math.max(...groups.flatMap((group) => group.columns.map(total)), ...(limit?.y ?? []));
  const [tall, top, bottom] = [170, 24, 34];
  const py = (value) => top + tall - (value / most) * tall;
  const figures = groups.map(({ title, columns }) => {
    const wide = Math.max(10, Math.min(34, 320 / columns.length));
    const axis = `${named}, ${unit}`;
    const width = Math.max(46 + wide * columns.length, 60 + title.length * 6.5, 46 + axis.length * 6);
    const parts = ticks(most, 4).map((v) => level(v, py(v), 40, 36, width));
    columns.forEach((column, stage) => {
      let below = 0;
      kinds.forEach((kind, index) => {
        const [from, to] = [py(below), py((below += column[kind]))];
        const box = `x="${42 + stage * wide}" y="${to}" width="${wide * 0.84}" height="${Math.max(from - to, 0)}"`;
        parts.push(
          `<rect ${box} fill="${KINDS[index]}"><title>${named} ${first + stage}, ${kind}: ${number(column[kind])} ${unit}</title></rect>`,
        );
      });
      const every = Math.ceil(columns.length / 16);
      if (stage % every === 0)
        parts.push(
          `<text x="${42 + (stage + 0.42) * wide}" y="${top + tall + 14}" text-anchor="middle">${first + stage}</text>`,
        );
    });
    const from = (stage) => (stage === 0 ? 40 : 42 + (stage - 0.08) * wide);
    limit?.y.forEach((y, stage) => {
      const to = stage === columns.length - 1 ? width : from(stage + 1);
      parts.push(`<line x1="${from(stage)}" x2="${to}" y1="${py(y)}" y2="${py(y)}" class="limit"/>`);
    });
    parts.push(`<text x="0" y="11" class="title">${escaped(title)}</text>`);
    parts.push(`<text x="40" y="${top + tall + 29}">${escaped(axis)}</text>`);
    const box = `viewBox="0 0 ${width} ${top + tall + bottom}" width="${width}"`;
    return `<svg class="chart" role="img" aria-label="${escaped(`${label}, ${title}`)}" ${box}>${parts.join("")}</svg>`;
  });
  const names = kinds.map((kind, index) => legend(kind, `<rect width="14" height="14" fill="${KINDS[index]}"/>`));
  if (limit) names.push(legend(limit.name, `<line x1="0" x2="14" y1="7" y2="7" class="limit"/>`));
  return `<div class="stacks">${figures.join("")}</div><p class="legend">${names.join("")}</p>`;
}
