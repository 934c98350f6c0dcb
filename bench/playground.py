"""Draws the pictures of docs/playground.md with Chromium, and serves the built page to
tests/page.

    python bench/playground.py

It needs npm, chromium and `pip install playwright`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.playground import ROOT, answers, build, served

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
READY = "document.querySelector('#curve .chart') && !document.querySelector('#status').textContent"


def edited() -> str:
    """2BW with a forward too many before stage 0's first backward, as the page's hash
    has it."""
    lists = answers.answer({"schedules": ["2bw"], "iterations": 2})["timelines"]["2bw"][
        "actions"
    ]
    return ";".join(["2bw", lists[0].replace("B0@0 F4@0", "F4@0 B0@0"), *lists[1:]])


CURVES = (
    "schedules=2bw,2bw-extra-warmup,pipedream-flush,gpipe&over=transfer&microbatches=16"
)
PICTURES = {  # hash, width, height, dark, the element at the top
    "docs/readme/playground.png": ("", 1000, 650, False, "#h-timelines"),
    "docs/playground/fault.png": (
        f"iterations=2&edit={quote(edited())}",
        1000,
        420,
        False,
        "#h-edit",
    ),
    "docs/playground/curve.png": (CURVES, 800, 560, True, "#h-curve"),
    "docs/playground/phone.png": (
        "schedules=2bw,pipedream-flush&stages=2",
        390,
        780,
        False,
        "#h-timelines",
    ),
}


@contextmanager
def chromium() -> Iterator:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        yield browser
        browser.close()


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as made,
        chromium() as browser,
        served(Path(made)) as address,
    ):
        build(Path(made))
        for name, (chosen, width, height, dark, top) in PICTURES.items():
            scheme = "dark" if dark else "light"
            page = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=scheme
            )
            page.set_default_timeout(120_000)
            page.goto(f"{address}#{chosen}")
            page.wait_for_function(READY)
            page.locator(top).evaluate("element => element.scrollIntoView()")
            if "readme" in name:  # the wait of 1F1B's first stage at its second batch
                canvas = page.locator("canvas").nth(1)
                canvas.hover(
                    position={"x": canvas.bounding_box()["width"] * 0.42, "y": 15}
                )
            page.wait_for_timeout(500)
            page.screenshot(path=ROOT / name)
            page.close()
            print(f"wrote {name}")


if __name__ == "__main__":
    main()
