"""Draws the README's two pictures, at the size at which it shows them, and that of
docs/schedules.md.

    python docs/readme/draw.py

schedules.png is simulated from the lists of actions that the runtime executes; its
gaps are those of megatron_2bw/run/flags/correction_notes.yaml. results.png shows
docs/bench/peers.json (docs/efficiency.md has its command).
first_screen.png is a screenshot of the README in Chromium, 1,280 pixels wide.
"""

import json
from operator import itemgetter
from pathlib import Path

from megatron_2bw.base.files import new_figure
from megatron_2bw.run.flags.correction_notes import percent_of, speed
from megatron_2bw.schedules import SCHEDULES, Shape, TwoBW
from megatron_2bw.tools.timelines.picture import draw_rows, draw_shapes
from megatron_2bw.tools.timelines.simulator import Times, simulate

HERE = Path(__file__).resolve().parent
HEIGHT = 2.7  # inches, 100 pixels of a page each
SHAPE = Shape(4, 4, 0, 4)
UNTIL = 44
# the dial: late microbatches of eight, on eight stages
LATE = (0, 2, 8)
EIGHT = Shape(8, 8, 0, 6)
UNTIL_EIGHT = 130
TOKENS = (2048, 8192)  # of a batch, whose gaps are shown


def draw_schedules(path: Path) -> None:
    figure = new_figure(4.8, 3.9)
    axes = figure.subplots(len(LATE), 1, sharex=True)
    for axis, late in zip(axes, LATE):
        is_all = late == EIGHT.microbatches
        events = simulate(TwoBW(late, predicts=is_all), EIGHT, Times())
        draw_rows(
            axis,
            events,
            EIGHT,
            UNTIL_EIGHT,
            numbers=False,
            steps=late == 0,
        )
        heading = "1F1B with a flush: none late, 15 slots a batch, the loss of vanilla"
        if late:
            slots = max(15 - late, 8)
            times = speed(EIGHT.stages, EIGHT.microbatches, late)
            share = late / EIGHT.microbatches
            correction = "predict" if is_all else "auto"
            name = "predicted" if is_all else "late"
            gaps = []
            for tokens in TOKENS:
                gaps.append(
                    f"{percent_of(tokens, share, correction):+.1f} % at {tokens:,}"
                )
            heading = (
                f"{late} {name}: {slots} slots, {times:.2f} x 1F1B; "
                f"loss {', '.join(gaps)} tokens a batch"
            )
        axis.set_title(heading, loc="left", fontsize=6.9)
        axis.tick_params(labelsize=7)
    legend = (
        "8 stages, 8 microbatches; light: forward, dark: backward, colours: batches"
    )
    axes[-1].set_xlabel(legend, fontsize=7.5)
    axes[-1].set_xticks([])
    figure.savefig(path, dpi=300)


NAMES = {
    "2bw": "2bw, all late, paper's rule",
    "2bw --two-bw-correction predict": "2bw, all late, predicted",
    "2bw --two-bw-late 25% --two-bw-correction auto": "2bw, default (2 late)",
    "megatron": "Megatron's 1F1B",
    "megatron-interleaved": "Megatron's interleaved",
    "torch-interleaved-1f1b": "torch's interleaved",
    "torch-zbv": "torch's ZBV",
}


def draw_results(measured: Path, path: Path) -> None:
    rows = json.loads(measured.read_text())["rows"]
    rows.sort(key=itemgetter("efficiency"))
    figure = new_figure(3.6, HEIGHT)
    axis = figure.subplots()
    for row in rows:
        name = f"{row['schedule']} {row['flags']}".strip()
        share = row["efficiency"]
        colour = "#0072b2" if row["schedule"] == "2bw" else "#bdbdbd"
        bar = axis.barh(NAMES.get(name, name), share, color=colour)
        axis.bar_label(bar, [f"{share:.0%}"], padding=2, fontsize=7.5)
    axis.set_xlim(0, 1.12)
    axis.set_xticks([])
    axis.tick_params(axis="y", length=0, labelsize=7.5)
    title = (
        "time in which stages compute, d = m = 8\n"
        "emulated: processes sleep in place of computing"
    )
    axis.set_title(title, loc="right", fontsize=7.5)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(path, dpi=300)


if __name__ == "__main__":
    draw_schedules(HERE / "schedules.png")
    panels = [(SCHEDULES[name], SHAPE) for name in ("2bw", "pipedream-flush", "gpipe")]
    draw_shapes(panels, HERE.parent / "schedules.png", until=UNTIL)
    dial = [(TwoBW(late), EIGHT) for late in (0, 2, 4, 7)]
    draw_shapes(dial, HERE.parent / "dial.png", until=UNTIL_EIGHT)
    draw_results(HERE.parent / "bench" / "peers.json", HERE / "results.png")
