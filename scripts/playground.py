"""Builds the page docs/playground into a folder for any static host, and serves it on
this host.

python scripts/playground.py [--out build/playground] [--port 8000]

The folder holds index.html with all modules and the first answer, grid.js with the
answers of the presets and of small sizes, the package as a zip file, and Pyodide from
npm. A browser opens index.html also from the file.
"""

import argparse
import functools
import http.server
import json
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import annotated_types

from megatron_2bw.base.errors import Parser, UserError, run_program
from megatron_2bw.base.files import write_whole
from megatron_2bw.tools.timelines.page import bundle, script_json

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "docs" / "playground"
sys.path.insert(0, str(SOURCE))
import answers  # noqa: E402

PYODIDE = "314.0.7"
FILES = "pyodide.mjs pyodide.asm.mjs pyodide.asm.wasm python_stdlib.zip pyodide-lock.json".split()
# What answers.py imports; of other packages one without any dependency.
PACKAGE = (
    "__init__.py",
    "base/*.py",
    "tools/__init__.py",
    "schedules/*.py",
    "engine/__init__.py",
    "engine/trace_file.py",
    "tools/timelines/*.py",
    "tools/planner/**/*.py",
    "tools/planner/descriptions/*.toml",
)
OTHER = Path(annotated_types.__file__)
SIZES = [{"stages": d, "microbatches": m} for d in (2, 4, 8) for m in (4, 8, 16)]
ASKED = (
    {"ask": "timelines"},
    {"ask": "figures"},
    {"ask": "curve", "over": "microbatches"},
    {"ask": "curve", "over": "transfer"},
)
Answers = dict[str, Any]


def key(request: Answers) -> str:
    """The name of a request in the grid, as docs/playground/python.js has it."""
    return json.dumps(request, separators=(",", ":"), sort_keys=True)


def grid(sizes: Answers) -> Answers:
    """The answers for all schedules with these parameters, by key. Defaults and the
    schedules are not in a key."""
    every = {"schedules": list(answers.SCHEDULES)}
    defaults = vars(answers.Parameters())
    found = {}
    for asked in ASKED:
        request = dict(asked)
        for name, value in sizes.items():
            if name != "schedules" and value != defaults[name]:
                request[name] = value
        found[key(request)] = answers.answer(request | every)
    return found


def build(out: Path) -> None:
    wasm = pyodide()
    presets = json.loads((SOURCE / "presets.json").read_text())
    out.mkdir(parents=True, exist_ok=True)
    first = {"presets": presets, "grid": grid({})}
    write_whole(out / "index.html", bundle(SOURCE / "index.html", {"first": first}))
    rest = {}
    for sizes in SIZES:
        rest |= grid(sizes)
    for preset in presets:
        rest |= grid(preset["parameters"])
    write_whole(out / "grid.js", f"window.grid={script_json(rest)};\n")
    for name in ("worker.js", "python.js"):
        shutil.copy(SOURCE / name, out)
    archive(out / "megatron_2bw.zip")
    (out / "pyodide").mkdir(exist_ok=True)
    for name in FILES:
        shutil.copy(wasm / name, out / "pyodide")


def archive(path: Path) -> None:
    """answers.py and the package's modules, as they are."""
    modules = set()
    for pattern in PACKAGE:
        modules |= set(ROOT.glob(f"megatron_2bw/{pattern}"))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for module in sorted(modules):
            file.write(module, module.relative_to(ROOT))
        file.write(SOURCE / "answers.py", "answers.py")
        file.write(OTHER, OTHER.relative_to(OTHER.parents[1]))


def pyodide() -> Path:
    """The folder of Pyodide, which npm puts into build/."""
    folder = ROOT / "build" / f"pyodide-{PYODIDE}"
    package = folder / "node_modules" / "pyodide"
    if all((package / name).exists() for name in FILES):
        return package
    if shutil.which("npm") is None:
        raise UserError(
            "npm is not installed, and Pyodide comes from it: install Node.js"
        )
    folder.mkdir(parents=True, exist_ok=True)
    command = f"npm install --no-audit --no-fund pyodide@{PYODIDE} --prefix".split()
    done = subprocess.run([*command, folder], capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip()[-300:]
        raise UserError(f"npm install pyodide@{PYODIDE}: {why}")
    return package


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Nothing is logged."""


@contextmanager
def served(folder: Path, port: int = 0) -> Iterator[str]:
    """The address of the folder on this host."""
    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}/"
        server.shutdown()


def main() -> int:
    parser = Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "playground")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()

    def work() -> None:
        build(options.out)
        print(f"wrote {options.out}", flush=True)
        with served(options.out, options.port) as address:
            print(f"{address} (Ctrl-C ends it)", flush=True)
            threading.Event().wait()

    return run_program(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
