"""The pictures of the paper's figures with numbers: bars by x, or curves over x, a
panel for each model and cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_2bw.base.files import new_figure, write_figure

# the last series, 2BW where it is one, is blue
COLOURS = ("#d0d0d0", "#8c8c8c", "#e69f00", "#00664c", "#0072b2")
# (series, x) -> a number, or a word that stands in its place
Values = Mapping[tuple[str, Any], float | str]


def draw(
    panels: Mapping[str, Values],
    dots: Mapping[str, Values],
    spec: Mapping[str, Any],
    path: Path,
) -> None:
    """Write the picture. dots: other numbers of the same places, as black dots; spec:
    of a figure in paper.yaml."""
    x, curves, heading = (
        spec.get("label", spec["x"]),
        spec.get("picture") == "curves",
        spec.get("legend"),
    )
    figure = new_figure(10, 4)
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    names = list(
        dict.fromkeys(series for values in panels.values() for series, _ in values)
    )
    colours = dict(zip(names, COLOURS[-len(names) :]))
    for axes, (title, values) in zip(all_axes, panels.items()):
        places = list(dict.fromkeys(place for _, place in values))
        places = (
            sorted(places)
            if not any(isinstance(place, str) for place in places)
            else places
        )
        own = [name for name in names if any(series == name for series, _ in values)]
        for number, series in enumerate(own):
            colour, shift = (
                colours[series],
                0.0 if curves else 0.8 * (number + 0.5) / len(own) - 0.4,
            )
            at = [
                (place, values[series, place])
                for place in places
                if (series, place) in values
            ]
            xs = [places.index(place) + shift for place, _ in at]
            heights = [
                value if isinstance(value, (int, float)) else 0 for _, value in at
            ]
            if curves:
                # a curve below another one remains visible
                size = 3 + 1.5 * (len(own) - number)
                for left in (left for left, height in zip(xs, heights) if not height):
                    axes.plot(
                        left, 0, "x", color=colour, markersize=size, clip_on=False
                    )
                xs, heights = zip(
                    *[pair for pair in zip(xs, heights) if pair[1]]
                    or [(0, float("nan"))]
                )
                axes.plot(
                    xs,
                    heights,
                    "o-",
                    color=colour,
                    markersize=size,
                    linewidth=size / 3,
                    label=series,
                )
            else:
                axes.bar(xs, heights, 0.75 / len(own), color=colour, label=series)
                for left, height, (_, value) in zip(xs, heights, at):
                    word = "OOM" if value == "out of memory" else str(value)
                    if height:
                        word = f"{value:.{3 if value < 1000 else 4}g}"
                    low = any(dots.get(title, {}).values())  # apart from the dots
                    place = (
                        dict(y=0, rotation=0, color="white")
                        if low
                        else dict(y=height, rotation=90)
                    )
                    axes.text(
                        left,
                        s=f" {word}",
                        ha="center",
                        va="bottom",
                        fontsize=7,
                        **place,
                    )
            real = [
                (left, dots.get(title, {}).get((series, place)))
                for left, (place, _) in zip(xs, at)
            ]
            real = [
                (left, value) for left, value in real if isinstance(value, (int, float))
            ]
            if real:
                axes.plot(
                    *zip(*real),
                    "o",
                    color="black",
                    markersize=4,
                    zorder=3,
                    label="measured, or the paper's",
                )
        axes.set_xticks(
            range(len(places)), [str(place).replace(" b ", "\nb ") for place in places]
        )
        axes.set(
            xlabel=x + " (×: out of memory)" * (curves and "OOM" in values.values()),
            title=title,
        )
        axes.tick_params(labelsize=8.5)
        axes.set_ylim(0, axes.get_ylim()[1] * (1.0 if curves else 1.15))
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].set_ylabel(spec.get("y", "samples / s"))
    shown = {
        label: handle
        for axes in all_axes
        for handle, label in zip(*axes.get_legend_handles_labels())
    }
    if len(shown) > 1:
        figure.legend(
            shown.values(),
            shown,
            loc="outside upper center",
            ncols=6,
            frameon=False,
            title=heading,
        )
    write_figure(path, figure)


def draw_placement(path: Path, stages: int, width: int, servers: int) -> None:
    """Figure 4: the stage of each GPU of `servers`, coloured by pipeline, in both of
    Megatron's rank orders."""
    from matplotlib.patches import Rectangle

    figure = new_figure(9, 3.2)
    each = stages * width // servers
    for axes, inside in zip(figure.subplots(1, 2), (False, True)):
        for rank in range(stages * width):
            stage, pipeline = (
                (rank % stages, rank // stages)
                if inside
                else (rank // width, rank % width)
            )
            place = rank % each, -(rank // each)
            axes.add_patch(Rectangle(place, 0.9, 0.8, color=f"C{pipeline}", alpha=0.4))
            axes.text(
                rank % each + 0.45,
                0.4 - rank // each,
                f"rank {rank}\nstage {stage}",
                ha="center",
                va="center",
            )
        axes.set(xlim=(-0.1, each), ylim=(1.0 - servers, 1.0), xticks=[])
        axes.set_yticks(
            [0.4 - server for server in range(servers)],
            [f"server {server}" for server in range(servers)],
        )
        order = (
            "--use-tp-pp-dp-mapping: messages stay inside"
            if inside
            else "Megatron's order: reductions stay inside"
        )
        axes.set_title(order, fontsize=10)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    figure.supxlabel("colours: the pipelines", fontsize=9)
    write_figure(path, figure)
