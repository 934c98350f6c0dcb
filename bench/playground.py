"""Draws the pictures of docs/playground with Chromium, and serves the built page to
tests/page.

    python bench/playground.py

It needs npm, chromium and `pip install playwright`.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.playground import ROOT, answers, build, served

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
READY = "document.querySelector('#curve .chart') && !document.querySelector('#status').textContent"


def edited() -> str:
    """2BW with a forward too many before stage 0's first backward, as the page's hash
    has it."""
    request = {"schedules": ["2bw"], "iterations": 2}
    lists = answers.answer(request)["timelines"]["2bw"]["actions"]
    lists[0] = lists[0].replace("B0@0 F4@0", "F4@0 B0@0")
    return quote(";".join(["2bw", *lists]))


@dataclass
class Picture:
    """The page with the parameters of `hash`, from the element `top` on."""

    hash: str
    width: int
    height: int
    top: str
    scheme: str = "light"


CURVES = (
    "schedules=2bw,2bw-extra-warmup,pipedream-flush,gpipe&over=transfer&microbatches=16"
)
PICTURES = {
    "docs/readme/playground.png": Picture("", 1000, 650, "#h-timelines"),
    "docs/playground/fault.png": Picture(
        f"iterations=2&edit={edited()}", 1000, 420, "#h-edit"
    ),
    "docs/playground/curve.png": Picture(CURVES, 800, 560, "#h-curve", "dark"),
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
        for name, picture in PICTURES.items():
            size = {"width": picture.width, "height": picture.height}
            page = browser.new_page(viewport=size, color_scheme=picture.scheme)
            page.set_default_timeout(120_000)
            page.goto(f"{address}#{picture.hash}")
            page.wait_for_function(READY)
            page.locator(picture.top).evaluate("element => element.scrollIntoView()")
            if "readme" in name:  # the wait of 1F1B's first stage at its second batch
                canvas = page.locator("canvas").nth(1)
                width = canvas.bounding_box()["width"]
                canvas.hover(position={"x": width * 0.42, "y": 15})
            page.wait_for_timeout(500)
            page.screenshot(path=ROOT / name)
            page.close()
            print(f"wrote {name}")


if __name__ == "__main__":
    main()
