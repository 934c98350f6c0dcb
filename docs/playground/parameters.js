// The parameters of the page: their fields in the form, and their place in the URL's hash.
// Ranges and meanings are checked in Python (answers.py), which answers with a line.

export const SCHEDULES = {
  "2bw": "2BW",
  "2bw-extra-warmup": "2BW, extra warm-up",
  "2bw-one-slot": "2BW, one gradient slot",
  "2bw-sync-start": "2BW, synchronous start",
  "pipedream-flush": "PipeDream-Flush (1F1B)",
  gpipe: "GPipe",
  "no-pipelining": "No pipelining",
  pipedream: "PipeDream",
  "megatron-interleaved": "Megatron, interleaved",
};

export const MODELS = (
  "gpt-355m gpt-1.3b gpt-2.2b gpt-3.8b gpt-8.3b gpt-28.3b gpt-175b bert-24 bert-48 bert-192 " +
  "llama-8b llama-70b qwen3-0.6b qwen3-8b qwen3-32b"
).split(" ");

/** name: [default, label, kind or choices, more]; kind "list": one number, or several with commas; more: folded away. */
export const FIELDS = {
  stages: [4, "Stages, d", "number"],
  microbatches: [8, "Microbatches a batch, m", "number"],
  forward: [1, "Forward: one time, or d", "list"],
  backward: [2, "Backward: one time, or d", "list"],
  transfer: [0, "Message: one time, or d − 1", "list"],
  step: [0, "Optimizer step", "number"],
  iterations: [3, "Batches shown", "number", true],
  reduce: [0, "Reduction of gradients", "number", true],
  occupied: [1, "Share of a message that fills its link", "number", true],
  extra_warmup: [1, "Extra warm-up: one number, or d − 1", "list", true],
  sync_iterations: [2, "Synchronous start, batches", "number", true],
  gpipe_round: [4, "GPipe's round, microbatches", "number", true],
  chunks: [2, "Interleaved: chunks a stage", "number", true],
  model: ["gpt-2.2b", "Model", MODELS, true],
  microbatch: [1, "Microbatch, samples", "number", true],
  precision: ["bf16", "Precision", ["bf16", "fp16", "fp32"], true],
  recompute: ["none", "Recompute", ["none", "selective", "full"], true],
};

/** What is only of the page: which schedules are shown, and how. */
const SHOWN = { schedules: ["2bw", "pipedream-flush"], colourBy: "batch", critical: false, over: "microbatches" };
const CHOICES = { colourBy: ["batch", "version"], over: ["microbatches", "transfer"] };

export function defaults() {
  return {
    ...Object.fromEntries(Object.entries(FIELDS).map(([name, [value]]) => [name, value])),
    ...SHOWN,
    edit: null,
  };
}

/** The request to Python: the parameters without what is only of the page. */
export function request(state) {
  const names = Object.keys(FIELDS).filter((name) => !same(state[name], FIELDS[name][0]));
  return Object.fromEntries(names.map((name) => [name, state[name]]));
}

export const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);

/** What a person typed in a field of a kind. */
export function typed(text, kind) {
  if (Array.isArray(kind)) return text;
  const words = text.split(/[,\s]+/).filter(Boolean);
  const numbers = words.map((word) => (Number.isFinite(Number(word)) ? Number(word) : word));
  return numbers.length < 2 ? (numbers[0] ?? "") : numbers;
}

export const written = (value) => (Array.isArray(value) ? value.join(", ") : String(value));

/** The hash of a state: what differs from the defaults. An edited list is its schedule and the lines of its stages. */
export function toHash(state) {
  const start = defaults();
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(state))
    if (!same(value, start[name]))
      words.set(name, name === "edit" ? [value.schedule, ...value.lists].join(";") : [value].flat().join(","));
  return words.toString();
}

const known = (schedule) => Object.hasOwn(SCHEDULES, schedule);

/** The state of a hash; unknown names are left out. */
export function fromHash(hash) {
  const state = defaults();
  for (const [name, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (Object.hasOwn(FIELDS, name)) state[name] = typed(text, FIELDS[name][2]);
    else if (name === "schedules") state.schedules = text.split(",").filter(known);
    else if (name === "critical") state.critical = text === "true";
    else if (Object.hasOwn(CHOICES, name) && CHOICES[name].includes(text)) state[name] = text;
    else if (name === "edit") {
      const [schedule, ...lists] = text.split(";");
      if (known(schedule)) state.edit = { schedule, lists };
    }
  }
  return state;
}
