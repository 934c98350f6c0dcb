// Python in a worker: a request comes as { id, request }, its answer leaves as { id, text }.

import { loadPyodide } from "./pyodide/pyodide.mjs";
import { start } from "./python.js";

const loaded = fetch("megatron_2bw.zip")
  .then((reply) => reply.arrayBuffer())
  .then((archive) => start(loadPyodide, {}, archive));
loaded.then(
  () => postMessage({ ready: true }),
  (error) => postMessage({ failed: String(error) }),
);
onmessage = async ({ data }) => {
  const answer = await loaded;
  postMessage({ id: data.id, text: answer(data.request) });
};
