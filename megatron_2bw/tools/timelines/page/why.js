// Sentences about an action: what it is, when it runs, and why the stage waits before it.

export const number = (value) => String(Number(value.toPrecision(4)));

const NAMES = { F: "forward", B: "backward" };

/** What the action does. */
export function what(event, microbatches) {
  const batch = Math.floor(event.number / microbatches);
  const chunk = event.chunk ? `, chunk ${String.fromCharCode(97 + event.chunk)}` : "";
  switch (event.kind) {
    case "F":
    case "B":
      return `${NAMES[event.kind]} of microbatch ${event.number} (batch ${batch}${chunk}) on weights W(${event.version})`;
    case "P":
      return `prediction of the weights on which batch ${event.number} runs`;
    case "R":
      return `start of the reduction of batch ${event.number}'s gradients`;
    default:
      return `optimizer step of batch ${event.number}, which writes W(${event.version})`;
  }
}

/** Why the stage waits before the action, or during a late step; "" if it does not wait. */
export function why(event, late) {
  if (!event.wait) return "";
  const { seconds, cause, queued } = event.wait;
  const waits = `Stage ${event.stage} waits ${number(seconds)}`;
  if (event.kind === "S") {
    const until = `: it needs the step's result, and stage ${cause.stage} starts the last reduction at ${number(cause.start)}`;
    return `${waits}${late ? " in the step" : " before it"}${until}.`;
  }
  const rest = event.start - cause.end - queued;
  const takes = rest > 1e-6 * event.start ? `, and the message takes ${number(rest)}` : "";
  const behind = queued ? ` after ${number(queued)} behind earlier messages on its link` : "";
  return `${waits} before it: stage ${cause.stage} ends ${cause.word} at ${number(cause.end)}${takes}${behind}.`;
}

/** All about the action, in sentences. */
export function about(event, microbatches, late) {
  const when =
    event.end > event.start ? `, from ${number(event.start)} to ${number(event.end)}` : `, at ${number(event.end)}`;
  const critical = event.critical ? " It is on the critical path." : "";
  const reason = why(event, late);
  return `Stage ${event.stage}, ${event.word}: ${what(event, microbatches)}${when}.${reason && " " + reason}${critical}`;
}
