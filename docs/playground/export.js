// What a person takes along: pictures, a trace, the link, Megatron's command line.

import { button, copied, element, save } from "./dom.js";
import { SCHEDULES } from "./parameters.js";

function png({ text, width, height }) {
  const image = new Image();
  image.onload = () => {
    const canvas = element("canvas", { width: 2 * width, height: 2 * height });
    canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height);
    canvas.toBlob((blob) => save("timelines.png", blob));
  };
  image.src = `data:image/svg+xml,${encodeURIComponent(text)}`;
}

export function exports(host, { python, stack, state, request, figures }) {
  const note = element("span", { role: "status", class: "wrong" });
  const trace = async (name) => {
    const found = await python.ask({ ask: "trace", ...request, schedules: [name] });
    note.textContent = found.error ?? "";
    if (!found.error) save(`${name}.json`, JSON.stringify(found), "application/json");
  };
  const names = Object.keys(figures).filter((name) => !figures[name].error);
  const commands = names.map((name) => {
    const { command, reason } = figures[name];
    const parts = command
      ? [button("Copy", copied(command)), element("pre", { class: "wrapped" }, command)]
      : [`: ${reason}`];
    return element(
      "details",
      {},
      element("summary", {}, `Megatron's command line of ${SCHEDULES[name]}, one GPU a stage`),
      ...parts,
    );
  });
  const tools = [
    button("PNG", () => png(stack.svg())),
    button("SVG", () => save("timelines.svg", stack.svg().text, "image/svg+xml")),
    button("Copy the link", (event) => copied(location.href)(event)),
    ...names.map((name) => button(`Perfetto trace of ${SCHEDULES[name]}`, () => trace(name))),
  ];
  host.replaceChildren(element("div", { class: "tools" }, ...tools, note), ...commands);
}
