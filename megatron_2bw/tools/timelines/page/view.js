// A timeline on a canvas, with pointer and keyboard. Several share one Span, so they zoom and scroll together.

import { element } from "./dom.js";
import { canvasPen } from "./pens.js";
import { at, draw, height, LEFT } from "./timeline.js";

/** The part of the time axis that is shown, and the position of playback. */
export class Span {
  constructor(end = 1) {
    this.listeners = [];
    this.fit(end);
  }
  /** Show all, up to `end`. */
  fit(end) {
    this.end = end;
    this.set(0, end);
  }
  set(from, to) {
    const length = Math.min(Math.max(to - from, this.end / 500), this.end);
    this.from = Math.min(Math.max(from, 0), this.end - length);
    this.to = this.from + length;
    this.changed();
  }
  zoom(factor, around = (this.from + this.to) / 2) {
    this.set(around - (around - this.from) / factor, around + (this.to - around) / factor);
  }
  move(by) {
    this.set(this.from + by, this.to + by);
  }
  /** Playback up to `now`; undefined ends it. */
  play(now) {
    this.now = now;
    if (now > this.to) this.move(now - this.from - (this.to - this.from) * 0.5);
    this.changed();
  }
  changed() {
    for (const listener of this.listeners) listener();
  }
}

/** Colours of the page's theme, for a pen. */
export function theme() {
  const style = getComputedStyle(document.documentElement);
  const names = ["ink", "ground", "idle", "accent", "update"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

const KEYS = "Arrow keys: action and stage. Plus and minus: zoom. C: to the action that the stage waits for.";

export class TimelineView {
  /** options: those of `draw`, without theme and selected; onSelect(event, timeline, idle) */
  constructor(host, span, label, options) {
    Object.assign(this, { span, options, selected: null });
    const named = { role: "application", "aria-label": `Timeline of ${label}. ${KEYS}` };
    this.canvas = element("canvas", { class: "timeline", tabindex: 0, ...named });
    host.append(this.canvas);
    this.listener = () => this.redraw();
    span.listeners.push(this.listener);
    new ResizeObserver(() => this.redraw()).observe(this.canvas);
    this.listen();
  }
  show(timeline, options = {}) {
    this.timeline = timeline;
    Object.assign(this.options, options);
    this.selected = null;
    this.canvas.style.height = `${height(timeline)}px`;
    this.redraw();
  }
  select(event, idle = false) {
    this.selected = event;
    this.redraw();
    this.options.onSelect?.(event, this.timeline, idle);
  }
  clear() {
    this.selected = null;
    this.redraw();
  }
  remove() {
    this.span.listeners = this.span.listeners.filter((listener) => listener !== this.listener);
    this.canvas.remove();
  }
  redraw() {
    this.pending ??= requestAnimationFrame(() => {
      this.pending = undefined;
      this.paint();
    });
  }
  paint() {
    if (!this.timeline) return;
    const [width, tall, ratio] = [this.canvas.clientWidth, height(this.timeline), window.devicePixelRatio || 1];
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(tall * ratio);
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    this.drawOn(canvasPen(context), width);
  }
  drawOn(pen, width) {
    const { selected, options } = this;
    draw(pen, this.timeline, width, this.span, { ...options, selected, theme: theme(), now: this.span.now });
  }
  listen() {
    const { canvas, span } = this;
    let dragged = null;
    const found = (event) => at(this.timeline, event.offsetX, event.offsetY, canvas.clientWidth, span);
    const time = (pixels) => (pixels / (canvas.clientWidth - LEFT)) * (span.to - span.from);
    canvas.addEventListener("pointerdown", (event) => (dragged = event.clientX));
    canvas.addEventListener("pointermove", (event) => {
      if (dragged !== null && event.buttons) {
        span.move(-time(event.clientX - dragged));
        dragged = event.clientX;
      } else if (event.pointerType === "mouse") this.point(found(event));
    });
    canvas.addEventListener("click", (event) => this.point(found(event)));
    canvas.addEventListener(
      "wheel",
      (event) => {
        if (!event.ctrlKey) return;
        event.preventDefault();
        span.zoom(event.deltaY < 0 ? 1.25 : 0.8, span.from + time(event.offsetX - LEFT));
      },
      { passive: false },
    );
    canvas.addEventListener("keydown", (event) => this.press(event));
  }
  point(found) {
    if (found?.event && found.event !== this.selected) this.select(found.event, found.idle);
  }
  press(event) {
    const now = this.selected ?? this.timeline.rows[0][0];
    const own = this.timeline.rows[now.stage];
    const beside = (by) => this.timeline.rows[now.stage + by]?.find((other) => other.end > now.start);
    const moves = {
      ArrowRight: () => own[now.place + (this.selected ? 1 : 0)],
      ArrowLeft: () => own[now.place - 1],
      ArrowUp: () => beside(-1),
      ArrowDown: () => beside(1),
      Home: () => own[0],
      End: () => own[own.length - 1],
      c: () => now.wait?.cause,
    };
    const zoom = { "+": 1.5, "=": 1.5, "-": 1 / 1.5 }[event.key];
    if (event.ctrlKey || event.metaKey || !(zoom || event.key in moves)) return;
    event.preventDefault();
    if (zoom) return this.span.zoom(zoom, (now.start + now.end) / 2);
    const to = moves[event.key]();
    if (!to) return;
    if (to.end < this.span.from || to.start > this.span.to)
      this.span.move(to.start - (this.span.from + this.span.to) / 2);
    this.select(to);
  }
}
