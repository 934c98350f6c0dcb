// Timelines under each other on one time axis: tools, playback, legend, the reason of a wait, and all of it as tables.

import { button, cell, element } from "./dom.js";
import { lowered, svgPen } from "./pens.js";
import { COLOURS, height, read } from "./timeline.js";
import { Span, theme, TimelineView } from "./view.js";
import { about, number } from "./why.js";

const SECONDS = 12; // of a whole playback
const TITLE = 24; // pixels, in an exported picture
const LEGEND = {
  forward: `background: ${COLOURS[0][0]}`,
  backward: `background: ${COLOURS[0][2]}`,
  "weight update": "width: 2px; height: 14px; background: var(--ink)",
  "time of the update": "height: 6px; background: var(--update)",
  idle: "background: var(--idle)",
};
const NUMBERS = "Numbers are microbatches, from 0; W is the weight version; a colour is a batch.";
const HINT =
  "Point at an action or at idle time, or select a timeline and press an arrow key: here is what runs, and why the stage waits.";

export class Stack {
  /** title(name) of a timeline; change(part): a person changes colourBy or critical; unit: a sentence about times */
  constructor(host, { title = (name) => name, change, unit = "" }) {
    Object.assign(this, { title, change, span: new Span(), cards: new Map() });
    this.slider = element("input", { type: "range", min: 0, max: 1000, value: 1000, "aria-label": "Playback" });
    this.slider.addEventListener("input", () => this.play((this.slider.value / 1000) * this.span.end));
    this.playing = button("▶ Play", () => this.toggle());
    const zoom = (label, name, work) => button(label, work, { "aria-label": name, title: name });
    this.version = button("Colour by weight version", () => this.recolour());
    this.critical = button("Critical path", () => this.change({ critical: !this.state.critical }));
    const tools = element(
      "div",
      { class: "tools" },
      this.playing,
      this.slider,
      zoom("−", "Zoom out", () => this.span.zoom(1 / 1.5)),
      zoom("+", "Zoom in (also Ctrl and wheel; drag to move)", () => this.span.zoom(1.5)),
      zoom("Fit", "Show everything", () => this.span.set(0, this.span.end)),
      this.version,
      this.critical,
    );
    const key = Object.entries(LEGEND).map(([text, style]) => element("span", {}, element("i", { style }), text));
    this.host = element("div", {});
    this.why = element("p", { class: "why", "aria-live": "polite" }, HINT);
    this.details = element("details", { ontoggle: () => this.tables() }, element("summary", {}, "As tables"));
    this.rows = element("div", {});
    this.details.append(this.rows);
    const legend = element("p", { class: "key" }, ...key, element("span", {}, `${NUMBERS} ${unit}`));
    host.replaceChildren(tools, legend, this.host, this.why, this.details);
  }
  recolour() {
    this.change({ colourBy: this.state.colourBy === "version" ? "batch" : "version" });
  }
  /** Show the answers; schedules that are no longer chosen leave. */
  show(answers, state) {
    this.state = state;
    this.version.setAttribute("aria-pressed", state.colourBy === "version");
    this.critical.setAttribute("aria-pressed", state.critical);
    for (const [name, card] of this.cards)
      if (!(name in answers)) {
        card.host.remove();
        card.view?.remove();
        this.cards.delete(name);
      }
    const read_ = Object.entries(answers).map(([name, answer]) => [name, answer, answer.error ? null : read(answer)]);
    const end = Math.max(...read_.map(([, , timeline]) => timeline?.makespan ?? 0), 1e-9);
    if (end !== this.span.end) {
      this.stop();
      this.span.fit(end);
      this.play(end);
    }
    this.why.textContent = HINT; // a selection ends with its timeline
    for (const [name, answer, timeline] of read_) this.showOne(name, answer, timeline);
    this.tables();
  }
  showOne(name, answer, timeline) {
    const card = this.cards.get(name) ?? this.add(name);
    this.host.append(card.host);
    card.note.textContent = answer.error ?? answer.note ?? "";
    card.note.className = answer.error ? "wrong" : "soft";
    card.body.hidden = Boolean(answer.error);
    const { microbatches, colourBy, critical } = this.state;
    if (timeline && timeline.makespan > this.span.end) this.span.fit(timeline.makespan);
    if (timeline) card.view.show(timeline, { microbatches, colourBy, critical });
  }
  add(name) {
    const [note, body] = [element("span"), element("div")];
    const host = element(
      "article",
      { class: "card" },
      element("header", {}, element("h3", {}, this.title(name)), note),
      body,
    );
    const onSelect = (event, timeline, idle) => this.explain(name, event, timeline, idle);
    const card = { host, note, body, view: new TimelineView(body, this.span, this.title(name), { onSelect }) };
    this.cards.set(name, card);
    return card;
  }
  explain(name, event, timeline, idle) {
    for (const [other, card] of this.cards) if (other !== name && card.view.selected) card.view.clear();
    const before = idle ? "Idle. The next action: " : "";
    this.why.classList.add("said");
    this.why.textContent = `${this.title(name)}. ${before}${about(event, this.state.microbatches, timeline.late)}`;
  }
  /** The figures in the headers of the cards. */
  describe(figures) {
    for (const [name, found] of Object.entries(figures)) {
      const card = this.cards.get(name);
      if (found.error || !card) continue;
      const busy = `${((1 - found.bubble) * 100).toFixed(1)} %`;
      const most = number(Math.max(...found.in_flight));
      const [rate, versions] = [number(found.throughput), Math.max(...found.versions)];
      card.note.innerHTML = `in the steady state <b>${rate}</b> microbatches per unit of time, stages busy <b>${busy}</b>; at most: weight versions <b>${versions}</b>, activations in flight <b>${most}</b>`;
      card.note.title = found.summary;
    }
  }
  /** Each timeline as a table: a row per stage, its actions with their times. Filled while it is open. */
  tables() {
    if (!this.details.open) return;
    const shown = [...this.cards].filter(([, card]) => !card.body.hidden);
    const rows = (timeline) =>
      timeline.rows.map((events, stage) => {
        const times = events.map((event) => cell(`${event.word} ${number(event.start)}–${number(event.end)}`));
        return element("tr", {}, element("th", { scope: "row" }, `stage ${stage}`), ...times);
      });
    const one = ([name, { view }]) => {
      const table = element("table", {}, element("caption", {}, this.title(name)), ...rows(view.timeline));
      return element("div", { class: "scroll actions" }, table);
    };
    this.rows.replaceChildren(...shown.map(one));
  }
  play(now) {
    this.span.play(now >= this.span.end ? undefined : now);
    this.slider.value = (1000 * Math.min(now, this.span.end)) / this.span.end;
  }
  toggle() {
    if (this.timer) return this.stop();
    const from = this.span.now ?? 0;
    const begun = performance.now();
    this.playing.textContent = "❚❚ Pause";
    const step = () => {
      const now = from + ((performance.now() - begun) / 1000 / SECONDS) * this.span.end;
      this.play(now);
      if (now < this.span.end) this.timer = requestAnimationFrame(step);
      else this.stop();
    };
    this.timer = requestAnimationFrame(step);
  }
  stop() {
    cancelAnimationFrame(this.timer);
    this.timer = undefined;
    this.playing.textContent = "▶ Play";
  }
  /** The timelines as one SVG document. */
  svg(width = 1200) {
    const shown = [...this.cards].filter(([, card]) => !card.body.hidden);
    const tall = shown.reduce((sum, [, { view }]) => sum + TITLE + height(view.timeline) + 8, 0);
    const pen = svgPen(width, tall);
    const colours = theme();
    pen.rect(0, 0, width, tall, colours.ground);
    let top = 0;
    for (const [name, { view }] of shown) {
      pen.text(2, top + TITLE / 2, this.title(name), colours.ink, 14, "start");
      view.drawOn(lowered(pen, top + TITLE), width);
      top += TITLE + height(view.timeline) + 8;
    }
    return { text: String(pen), width, height: tall };
  }
}
