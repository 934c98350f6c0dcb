// node parity.mjs FOLDER REQUESTS.json ANSWERS.json: the answers of the page's Python, from the built page's files.

import { readFileSync, writeFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [folder, requests, answers] = process.argv.slice(2);
const module = (name) => import(pathToFileURL(resolve(folder, name)));
const { loadPyodide } = await module("pyodide/pyodide.mjs");
const { start } = await module("python.js");
const answer = await start(loadPyodide, {}, new Uint8Array(readFileSync(resolve(folder, "megatron_2bw.zip"))));
const found = JSON.parse(readFileSync(requests)).map((request) => answer(request));
writeFileSync(answers, JSON.stringify(found));
