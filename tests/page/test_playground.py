"""The page docs/playground: its Python in node answers as CPython does, and a person's
way through it in Chromium.

Needs npm and node; all but the parity also playwright and chromium (make
test-playground).
"""

import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from bench import playground as bench
from megatron_2bw.base.errors import UserError
from megatron_2bw.schedules import Shape
from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions import cluster, model
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.tell import report
from megatron_2bw.tools.timelines.trace import merge
from scripts.playground import answers
from tests.unit.test_trace import write

pytestmark = pytest.mark.skipif(
    shutil.which("npm") is None, reason="npm is not installed"
)
in_browser = pytest.mark.skipif(
    bench.CHROMIUM is None, reason="chromium is not installed"
)


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    try:
        bench.build(folder)
    except UserError as error:  # no network, say
        pytest.skip(str(error))
    return folder


@pytest.fixture(scope="session")
def served(built):
    """The address of the built page on this host."""
    with bench.served(built) as address:
        yield address


@pytest.fixture(scope="session")
def chromium():
    pytest.importorskip("playwright.sync_api")
    with bench.chromium() as browser:
        yield browser


@pytest.fixture
def page(chromium):
    """A new page; the test fails if its console has an error, or if it asks another
    host for anything."""
    errors = []
    own = ("file:", "http://localhost:", "data:", "blob:")

    def note_line(line) -> None:
        if line.type in ("error", "warning"):
            errors.append(line.text)

    def note_error(error) -> None:
        errors.append(str(error))

    def note_request(request) -> None:
        if not request.url.startswith(own):
            errors.append(request.url)

    context = chromium.new_context(
        viewport={"width": 1240, "height": 900}, accept_downloads=True
    )
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.on("console", note_line)
    page.on("pageerror", note_error)
    page.on("request", note_request)
    yield page
    context.close()
    assert errors == []


TIMES = (0, 0.1, 0.3, 1, 1.7, 2.5)


def drawn(source: random.Random) -> dict:
    """A request with random parameters, legal or not."""
    pick = source.choice
    stages = source.randint(1, 9)

    def times(count: int):
        return pick([pick(TIMES), [pick(TIMES) for _ in range(count)]])

    asked = [
        {"ask": "timelines"},
        {"ask": "figures"},
        {"ask": "trace"},
        {"ask": "check", "lists": ["F0@0 B0@0"] * stages},
    ]
    if source.random() < 0.05:
        asked = [{"ask": "curve", "over": pick(["microbatches", "transfer"])}]
    return pick(asked) | {
        "stages": stages,
        "microbatches": source.randint(1, 24),
        "iterations": source.randint(1, 4),
        "forward": times(stages),
        "backward": times(stages),
        "transfer": times(stages - 1),
        "occupied": pick([0, 0.5, 1]),
        "reduce": pick(TIMES),
        "step": pick(TIMES),
        "extra_warmup": pick([0, 1, 2]),
        "chunks": pick([2, 3, 4]),
        "gpipe_round": source.randint(1, 9),
        "sync_iterations": source.randint(0, 3),
        "microbatch": pick([1, 4]),
        "model": pick(["gpt-2.2b", "bert-48", "llama-8b"]),
        "recompute": pick(["none", "selective", "full"]),
        "schedules": source.sample(list(answers.SCHEDULES), 3),
    }


def test_pyodide_answers_as_cpython_does(built, tmp_path):
    """200 random requests: equal JSON, to the last digit."""
    source = random.Random(7)
    requests = [drawn(source) for _ in range(200)]
    asked = tmp_path / "requests.json"
    asked.write_text(json.dumps(requests))
    answered = tmp_path / "answers.json"
    script = Path(__file__).with_name("parity.mjs")
    subprocess.run(["node", script, built, asked, answered], check=True)
    found = json.loads(answered.read_text())
    expected = [json.dumps(answers.answer(request)) for request in requests]
    for request, one, other in zip(requests, found, expected, strict=True):
        assert one == other, request
    assert sum('"error"' in text for text in expected) < 150


def ready(page) -> None:
    """Wait until all answers of the state are shown."""
    page.wait_for_function(bench.READY)


def inked(page) -> list[int]:
    """The number of colours on each timeline's canvas."""
    count = """canvas => { const { width, height } = canvas, copy = new OffscreenCanvas(width, height);
        const context = copy.getContext('2d', { willReadFrequently: true });
        context.drawImage(canvas, 0, 0);
        const c = context.getImageData(0, 0, width, height).data, found = new Set();
        for (let k = 0; k < c.length; k += 4) found.add(c[k] << 16 | c[k + 1] << 8 | c[k + 2]);
        return found.size }"""
    page.wait_for_timeout(200)
    canvases = page.query_selector_all("canvas")
    return [page.evaluate(count, canvas) for canvas in canvases]


def assert_both_drawn(page) -> None:
    colours = inked(page)
    assert len(colours) == 2
    assert min(colours) > 20


def choose_five_stages(page) -> None:
    page.fill("[name=stages]", "5")
    page.press("[name=stages]", "Enter")


THREE_ROWS = "document.querySelectorAll('#figures tbody tr').length === 3"


def wait_for_text(page, selector: str, text: str) -> None:
    script = f"document.querySelector('{selector}').textContent.includes('{text}')"
    page.wait_for_function(script)


@in_browser
def test_the_first_paint_from_a_file_needs_no_python(page, built):
    page.goto((built / "index.html").as_uri())
    ready(page)
    assert_both_drawn(page)
    bubble = "#figures tbody tr:first-child td:nth-child(2)"
    assert page.inner_text(bubble) == "0.0 %"
    # the grid has all presets
    for preset in page.query_selector_all(".presets button"):
        preset.click()
        ready(page)
        assert "error" not in page.get_attribute("#status", "class")
        assert page.query_selector(".wrong:not(:empty)") is None
    choose_five_stages(page)
    wait_for_text(page, "#status", "make playground")


@in_browser
def test_free_parameters_are_computed_and_the_link_can_be_shared(page, served):
    page.goto(served)
    ready(page)
    choose_five_stages(page)
    page.check("[value=gpipe]")
    page.wait_for_function(THREE_ROWS)
    request = {"ask": "figures", "stages": 5, "schedules": ["gpipe"]}
    bubble = answers.answer(request)["figures"]["gpipe"]["bubble"]
    cell = page.inner_text("#figures tbody tr:last-child td:nth-child(2)")
    assert cell == f"{100 * bubble:.1f} %"
    link = page.url
    assert "stages=5" in link
    assert "gpipe" in link
    shown = page.inner_text("#figures")
    page.goto("about:blank")
    page.goto(link)
    page.wait_for_function(THREE_ROWS)
    assert page.inner_text("#figures") == shown


@in_browser
def test_why_a_stage_waits_by_pointer_and_by_keyboard(page, built):
    page.goto((built / "index.html").as_uri())
    ready(page)
    canvas = page.query_selector("canvas")
    box = canvas.bounding_box()
    unit = (box["width"] - 62) / 99  # 1F1B ends at 99
    page.mouse.move(box["x"] + 62 + 6 * unit, box["y"] + 10)
    why = page.inner_text(".why")
    assert why.startswith("2BW. Idle. The next action: Stage 0, B0@0: backward")
    assert why.endswith("Stage 0 waits 6 before it: stage 1 ends B0@0 at 10.")
    canvas.focus()
    page.keyboard.press("c")
    assert "2BW. Stage 1, B0@0: backward" in page.inner_text(".why")
    page.keyboard.press("ArrowRight")
    assert "Stage 1, F3@0" in page.inner_text(".why")


@in_browser
def test_an_edited_list_is_judged(page, served):
    page.goto(served)
    ready(page)
    line = "F0@0 F1@0 F2@0 F3@0 F4@0 B0@0"
    text = page.input_value("#edit textarea")
    text = text.replace("F0@0 F1@0 F2@0 F3@0 B0@0 F4@0", line, 1)
    page.fill("#edit textarea", text)
    page.click("#edit button:text-is('Check')")
    page.wait_for_selector("#edit mark")
    assert page.inner_text("#edit mark") == "F4@0"
    # the fault is in view, and its stage
    assert page.evaluate("document.querySelector('#edit pre').scrollLeft") == 0
    fault = "Stage 0, action 4: 5 microbatches in flight, at most 4 allowed"
    assert fault in page.inner_text("#edit")
    assert "edit=2bw" in page.url
    page.click("#edit button:text-is('Reset')")
    page.click("#edit button:text-is('Check')")
    wait_for_text(page, "#edit", "The lists pass")
    page.wait_for_function("document.querySelectorAll('canvas').length === 3")


@in_browser
def test_exports(page, served):
    page.goto(served)
    ready(page)

    def saved(label: str) -> bytes:
        with page.expect_download() as download:
            page.click(f"#export button:text-is('{label}')")
        return Path(download.value.path()).read_bytes()

    assert saved("PNG")[:4] == b"\x89PNG"
    svg = saved("SVG").decode()
    assert svg.startswith("<svg")
    assert svg.count("<rect") > 2 * 2 * 4 * 24
    trace = json.loads(saved("Perfetto trace of 2BW"))
    assert trace == answers.answer({"ask": "trace", "schedules": ["2bw"]})
    page.click("summary:has-text('command line of 2BW')")
    assert page.inner_text("#export pre").startswith("megatron-2bw train gpt ")


@in_browser
def test_the_page_of_a_report(page, tmp_path):
    """Sorting, choosing a plan, and its flags."""
    cost = Cost(model.preset("gpt-355m"), cluster.preset("p3.16xlarge", 1), "fp16")
    plans = [
        Plan(1, 4, 2, 1, 8),
        Plan(1, 2, 4, 1, 8, schedule="gpipe"),
        Plan(2, 4, 1, 2, 8),
    ]
    report.write_report(cost, [cost.estimate(plan) for plan in plans], tmp_path)
    page.goto((tmp_path / "index.html").as_uri())
    assert min(inked(page)) > 20
    assert "which have a rank: 3" in page.inner_text("#counted")
    for sign in ("▲", "▼"):
        page.click("[data-by=depth]")
        assert sign in page.inner_text("[data-by=depth]")
        cells = page.query_selector_all("#plans tbody td:nth-child(4)")
        depths = [int(cell.inner_text()) for cell in cells]
        assert depths == sorted([4, 2, 4], reverse=sign == "▼")
    chosen = plans[1]
    button = f"[aria-label='Show {chosen.title}']"
    page.click(button)
    assert page.inner_text("#flags pre") == " ".join(chosen.flags("fp16"))
    assert page.get_attribute(button, "aria-pressed") == "true"
    assert len(page.query_selector_all("#timeline canvas")) == 1
    assert min(inked(page)) > 20
    assert chosen.title in page.inner_text("#timeline")


@in_browser
def test_the_page_of_a_trace(page, tmp_path):
    write(tmp_path, Shape(3, 4, 0, 5), "pipedream-flush")
    *_, html = merge(tmp_path)
    page.goto(html.as_uri())
    assert_both_drawn(page)
    page.click("summary")
    assert page.inner_text(".actions caption >> nth=1").startswith("Simulated")
    assert page.inner_text("#medians tr:nth-child(2) td >> nth=0") == "1000"
