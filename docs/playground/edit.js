// The editor of a schedule's lists: the validator marks the first fault, or the edited lists get a timeline.

import { button, element } from "./dom.js";
import { request, same, SCHEDULES } from "./parameters.js";
import { read } from "./timeline.js";

export class Editor {
  /** ask: of Python; change(edit): what the page's state keeps of an edit, { schedule, lists } or null */
  constructor(host, ask, stack, change) {
    Object.assign(this, { host, ask, stack, change });
    this.choice = element("select", { "aria-label": "Schedule to edit", onchange: () => this.reset() });
    this.text = element("textarea", {
      "aria-label": "Lists of actions, a line per stage",
      spellcheck: "false",
      rows: 5,
    });
    this.result = element("div", { "aria-live": "polite" });
    const tools = element(
      "div",
      { class: "tools" },
      this.choice,
      button("Check", () => this.check()),
      button("B0@0 of stage 0 one earlier", () => this.swap(/(\S+) (B0@0)/)),
      button("B0@0 of stage 0 one later", () => this.swap(/(B0@0) (\S+)/)),
      button("Reset", () => this.reset()),
    );
    host.replaceChildren(tools, this.text, this.result);
  }
  show(answers, state) {
    Object.assign(this, { answers, state });
    const names = Object.keys(answers).filter((name) => !answers[name].error);
    const kept = state.edit?.schedule ?? this.choice.value;
    this.choice.replaceChildren(...names.map((name) => element("option", { value: name }, SCHEDULES[name])));
    if (names.includes(kept)) this.choice.value = kept;
    const edit = names.includes(state.edit?.schedule) ? state.edit : null;
    if (edit || names.length) this.renew(edit?.lists ?? answers[this.choice.value].actions);
    if (edit) this.judge();
    else this.result.replaceChildren();
  }
  /** Write other lists; what a person has typed and not checked stays while the lists are the same. */
  renew(lists) {
    if (!same(lists, this.written)) this.write(lists);
  }
  write(lists) {
    this.written = lists;
    this.text.value = lists.join("\n");
    this.text.rows = Math.min(lists.length + 1, 18);
  }
  get lists() {
    return this.text.value
      .split("\n")
      .map((line) => line.trim())
      .filter(Boolean);
  }
  reset() {
    this.change(null);
    this.write(this.answers[this.choice.value].actions);
  }
  swap(pair) {
    const lists = this.lists;
    lists[0] = lists[0].replace(pair, "$2 $1");
    this.text.value = lists.join("\n");
    this.check();
  }
  check() {
    this.change({ schedule: this.choice.value, lists: this.lists });
  }
  async judge() {
    const { state } = this;
    const { schedule, lists } = state.edit;
    const found = await this.ask({ ask: "check", ...request(state), schedules: [schedule], lists });
    if (state !== this.state) return; // a person has changed it meanwhile
    if (found.error || found.reason) return this.fault(found);
    this.result.replaceChildren(element("p", {}, "The lists pass. Their timeline stands below the others."));
    this.stack.showOne("edited", {}, read(found.timeline));
  }
  fault({ error, reason, stage, step, grid }) {
    const where = stage === undefined ? "" : `Stage ${stage}${step === null ? "" : `, action ${step}`}: `;
    const parts = [element("p", { class: "wrong" }, error ?? where + reason)];
    if (grid) {
      // Two blanks for the signs around the fault: columns stay below each other.
      const [before, fault, after] = grid.split(/>(.*?)</);
      parts.push(element("pre", { tabindex: 0 }, before, element("mark", {}, fault), `  ${after}`));
    }
    this.result.replaceChildren(...parts);
    const mark = this.result.querySelector("mark");
    const box = mark?.parentElement;
    if (mark && mark.offsetLeft + mark.offsetWidth > box.clientWidth) box.scrollLeft = mark.offsetLeft - 200;
  }
}
