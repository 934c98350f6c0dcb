// The form of the parameters, with the presets.

import { element } from "./dom.js";
import { defaults, FIELDS, SCHEDULES, typed, written } from "./parameters.js";

/** Fill `form`; `change(part of a state)` is called with what a person changed. */
export function build(form, presets, change) {
  const preset = ({ name, parameters }) =>
    element("button", { type: "button", onclick: () => change({ ...defaults(), ...parameters }) }, name);
  const schedule = ([name, label]) => {
    const box = element("input", { type: "checkbox", name: "schedule", value: name });
    return element("label", {}, box, label);
  };
  const field = ([name, [, label, kind]]) => element("label", {}, element("span", {}, label), input(name, kind));
  const named = (more) => Object.entries(FIELDS).filter(([, entry]) => Boolean(entry[3]) === more);
  const more = element("details", {}, element("summary", {}, "Options of schedules, model, memory"));
  more.append(element("div", {}, ...named(true).map(field)));
  form.replaceChildren(
    element(
      "div",
      { class: "presets tools" },
      element("span", { class: "soft" }, "Start from"),
      ...presets.map(preset),
    ),
    element(
      "fieldset",
      {},
      element("legend", {}, "Schedules"),
      element("div", { class: "choices tools" }, ...Object.entries(SCHEDULES).map(schedule)),
    ),
    ...named(false).map(field),
    more,
  );
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", ({ target }) => {
    if (target.name !== "schedule") return change({ [target.name]: typed(target.value, FIELDS[target.name][2]) });
    const boxes = [...form.querySelectorAll("[name=schedule]:checked")];
    change({ schedules: boxes.map((box) => box.value) });
  });
}

function input(name, kind) {
  if (Array.isArray(kind)) return element("select", { name }, ...kind.map((value) => element("option", {}, value)));
  const attributes =
    kind === "number" ? { type: "number", step: "any", min: "0" } : { type: "text", inputmode: "decimal" };
  return element("input", { name, ...attributes });
}

/** Show the state's values. */
export function fill(form, state) {
  for (const name of Object.keys(FIELDS)) form.elements[name].value = written(state[name]);
  for (const box of form.querySelectorAll("[name=schedule]")) box.checked = state.schedules.includes(box.value);
}
