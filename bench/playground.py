"""How fast the page docs/playground is in Chromium: its first paint, the start of Python, a new timeline.

    python bench/playground.py [--stages 16] [--microbatches 64] [--repeats 15] [--pictures]

It needs npm, chromium and `pip install playwright`. Times are the browser's own (performance.mark and paint timing); a
new timeline lasts from the change of a parameter to the frame in which it is drawn. --pictures draws those of the docs.
"""

from __future__ import annotations

import functools
import http.server
import shutil
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import new_parser, write_result
from megatron_2bw.playground import answer
from scripts.playground import build

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
READY = "document.querySelector('#curve .chart') && !document.querySelector('#status').textContent"
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
DRAWN = "performance.getEntriesByName('timelines').at(-1)?.duration"


def edited() -> str:
    """2BW with a forward too many before stage 0's first backward, as the page's hash has it."""
    lists = answer({"schedules": ["2bw"], "iterations": 2})["timelines"]["2bw"]["actions"]
    return ";".join(["2bw", lists[0].replace("B0@0 F4@0", "F4@0 B0@0"), *lists[1:]])


CURVES = "schedules=2bw,2bw-extra-warmup,pipedream-flush,gpipe&over=transfer&microbatches=16"
PICTURES = {  # hash, width, height, dark, the element at the top
    "docs/readme/playground.png": ("", 1000, 650, False, "#h-timelines"),
    "docs/playground/fault.png": (f"iterations=2&edit={quote(edited())}", 1000, 420, False, "#h-edit"),
    "docs/playground/curve.png": (CURVES, 800, 560, True, "#h-curve"),
    "docs/playground/phone.png": ("schedules=2bw,pipedream-flush&stages=2", 390, 780, False, "#h-timelines"),
}


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of the folder on this host."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}/"
        server.shutdown()


@contextmanager
def chromium() -> Iterator:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def first_paint(browser, address: str) -> float:
    page = browser.new_page()
    page.goto(address)
    page.wait_for_function(PAINT)
    found = page.evaluate(PAINT)
    page.close()
    return found


def timelines(browser, address: str, stages: int, microbatches: int, repeats: int) -> dict[str, float | list[float]]:
    """Milliseconds until Python has answered a first request, and of each new timeline of 2bw after that."""
    page = browser.new_page()
    page.set_default_timeout(120_000)
    page.goto(address)
    page.wait_for_function(READY)
    found = []
    for turn in range(repeats + 1):
        chosen = f"schedules=2bw&stages={stages}&microbatches={microbatches}&forward={1 + turn / 100}"
        page.evaluate("hash => { performance.clearMeasures(); location.hash = hash }", chosen)
        page.wait_for_function(DRAWN)
        found.append(page.evaluate(DRAWN))
        page.wait_for_function(READY)
    page.close()
    return {"start": found[0], "timelines": found[1:]}


def draw(browser, address: str) -> None:
    for name, (chosen, width, height, dark, top) in PICTURES.items():
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light")
        page.set_default_timeout(120_000)
        page.goto(f"{address}#{chosen}")
        page.wait_for_function(READY)
        page.locator(top).evaluate("element => element.scrollIntoView()")
        if "readme" in name:  # the wait of 1F1B's first stage at its second batch
            canvas = page.locator("canvas").nth(1)
            box = canvas.bounding_box()
            canvas.hover(position={"x": box["width"] * 0.42, "y": 15})
        page.wait_for_timeout(500)
        page.screenshot(path=ROOT / name)
        page.close()
        print(f"wrote {name}")


def main() -> int:
    parser = new_parser(__doc__, "playground")
    parser.add_argument("--stages", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--pictures", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made, chromium() as browser:
        folder = Path(made)
        build(folder)
        with served(folder) as address:
            if options.pictures:
                draw(browser, address)
                return 0
            file = (folder / "index.html").as_uri()
            paints = {at.split(":")[0]: [first_paint(browser, at) for _ in range(5)] for at in (file, address)}
            found = timelines(browser, address, options.stages, options.microbatches, options.repeats)
    for name, values in paints.items():
        print(f"first paint over {name}: {statistics.median(values):.0f} ms (least {min(values):.0f})")
    print(f"Python's start and a first timeline: {found['start'] / 1e3:.1f} s")
    values = found["timelines"]
    times = f"{statistics.median(values):.0f} ms (least {min(values):.0f}, most {max(values):.0f})"
    print(f"a new timeline, d = {options.stages}, m = {options.microbatches}: {times}")
    write_result(options.json, {"paint": paints, **found, "sizes": [options.stages, options.microbatches]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
