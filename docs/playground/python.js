// Answers of answers.py: from the precomputed grid, or from Python in a worker, which starts when needed.

/** The `answer` of answers.py in a Pyodide that `loadPyodide` makes; archive: the zipped package. Also for node. */
export async function start(loadPyodide, options, archive) {
  const pyodide = await loadPyodide(options);
  pyodide.unpackArchive(archive, "zip");
  const answer = pyodide.runPython(`
import gc, json
gc.set_threshold(100000)  # a timeline is many small tuples, and no cycle
from answers import answer
lambda text: json.dumps(answer(json.loads(text)))
`);
  return (request) => answer(JSON.stringify(request));
}

/** The text by which the grid names a request: its schedules do not count, except where an answer is of one. */
export function key(request) {
  const { schedules, ...rest } = request;
  return JSON.stringify(Object.fromEntries(Object.entries(rest).sort(([one], [other]) => (one < other ? -1 : 1))));
}

const PARTS = { timelines: "timelines", figures: "figures", curve: "curves" };

export class Python {
  /** grid: answers by key, each of all schedules; report(text, wrong): what the page says of Python's start. */
  constructor(grid, report) {
    Object.assign(this, { grid, report, count: 0, waiting: new Map() });
  }
  get available() {
    return location.protocol !== "file:";
  }
  /** Whether the answer is precomputed. */
  knows(request) {
    return Object.hasOwn(this.grid, key(request));
  }
  /** The answer to a request, as a promise. */
  async ask(request) {
    if (!this.knows(request)) await this.rest;
    const known = this.grid[key(request)];
    const part = PARTS[request.ask];
    if (known && part) {
      const chosen = Object.fromEntries(request.schedules.map((name) => [name, known[part][name]]));
      return { ...known, [part]: chosen };
    }
    if (!this.available)
      return {
        error:
          "A page from a file shows the presets, and 2, 4 or 8 stages with 4, 8 or 16 microbatches. For all else run: make playground",
      };
    this.load();
    if (this.failed) return this.failed;
    const id = this.count++;
    const answer = new Promise((resolve) => this.waiting.set(id, resolve));
    this.worker.postMessage({ id, request });
    return answer;
  }
  /** Start the worker, once. */
  load() {
    if (this.worker || !this.available) return;
    this.report("Loading Python …");
    this.worker = new Worker(new URL("worker.js", document.baseURI), { type: "module" });
    this.worker.onmessage = ({ data }) => {
      if (data.ready) return this.report("");
      if (data.failed) return this.fail(data.failed);
      this.waiting.get(data.id)(JSON.parse(data.text));
      this.waiting.delete(data.id);
    };
    this.worker.onerror = (event) => this.fail(event.message);
  }
  fail(message) {
    this.failed = { error: `Python cannot be loaded: ${message ?? "its files are missing"}` };
    this.report(this.failed.error, true);
    for (const resolve of this.waiting.values()) resolve(this.failed);
    this.waiting.clear();
  }
}
