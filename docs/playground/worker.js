// Python in a worker: a request comes as { id, request }, its answer leaves as { id, text }.

import { loadPyodide } from "./pyodide/pyodide.mjs";
import { start } from "./python.js";

const loaded = fetch("megatron_2bw.zip")
  .then((reply) => (reply.ok ? reply.arrayBuffer() : Promise.reject(`megatron_2bw.zip: ${reply.statusText}`)))
  .then((archive) => start(loadPyodide, {}, archive));
loaded.then(
  () => postMessage({ ready: true }),
  (error) => postMessage({ failed: String(error) }),
);
onmessage = async ({ data }) => {
  const answer = await loaded;
  let text;
  try {
    text = answer(data.request);
  } catch (error) {
    text = JSON.stringify({ error: String(error).trim().split("\n").at(-1) }); // the last line of Python's traceback
  }
  postMessage({ id: data.id, text });
};
