"""The pictures of the paper's figures with numbers: bars by x, or curves over x, a
panel for each model and cluster."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_2bw.base.files import new_figure, write_figure
from scripts.paper_data import Row
from scripts.paper_figures import Point

# the last series, 2BW where it is one, is blue
COLOURS = ("#d0d0d0", "#8c8c8c", "#e69f00", "#00664c", "#0072b2")


def draw(found: Sequence[Point], spec: Row, path: Path) -> None:
    """Write the picture of a figure's points; measured values, or the paper's, are
    black dots. spec: the figure in paper.yaml."""
    series = list(dict.fromkeys(point.series for point in found))
    colours = dict(zip(series, COLOURS[-len(series) :]))
    panels = {}
    for point in found:
        panels.setdefault(point.panel, []).append(point)
    figure = new_figure(10, 4)
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    handles = {}
    for axes, (title, own) in zip(all_axes, panels.items()):
        axes.set_title(title)
        _draw_panel(axes, own, colours, spec)
        for handle, label in zip(*axes.get_legend_handles_labels()):
            handles[label] = handle
    all_axes[0].set_ylabel(spec.get("y", "samples / s"))
    if len(handles) > 1:
        figure.legend(
            handles.values(),
            handles,
            loc="outside upper center",
            ncols=6,
            frameon=False,
            title=spec.get("legend"),
        )
    write_figure(path, figure)


def _draw_panel(
    axes: Any, found: list[Point], colours: Mapping[str, str], spec: Row
) -> None:
    places = list(dict.fromkeys(point.x for point in found))
    if not isinstance(places[0], str):
        places.sort()
    present = {point.series for point in found}
    names = [name for name in colours if name in present]
    curves = spec.get("picture") == "curves"
    dotted = any(_dot(point) for point in found)
    for number, name in enumerate(names):
        shift = 0 if curves else 0.8 * (number + 0.5) / len(names) - 0.4
        own = [point for point in found if point.series == name]
        own.sort(key=lambda point: places.index(point.x))
        heights = {}
        dots = {}
        for point in own:
            left = places.index(point.x) + shift
            heights[left] = point.predicted
            if not isinstance(_dot(point), str):
                dots[left] = _dot(point)
        style = {"color": colours[name], "label": name}
        if curves:
            # a curve below another one remains visible
            size = 3 + 1.5 * (len(names) - number)
            _draw_curve(axes, heights, size, style)
        else:
            _draw_bars(axes, heights, 0.75 / len(names), dotted, style)
        if dots:
            black = {"color": "black", "label": "measured, or the paper's"}
            axes.plot(dots.keys(), dots.values(), "o", markersize=4, zorder=3, **black)
    labels = [str(place).replace(" b ", "\nb ") for place in places]
    axes.set_xticks(range(len(places)), labels)
    label = spec.get("label", spec["x"])
    if curves and any(point.predicted == "OOM" for point in found):
        label += " (×: out of memory)"
    axes.set_xlabel(label)
    axes.tick_params(labelsize=8.5)
    axes.set_ylim(0, axes.get_ylim()[1] * (1.0 if curves else 1.15))
    axes.spines[["top", "right"]].set_visible(False)


def _dot(point: Point) -> float | str:
    return point.measured or point.paper


def _draw_curve(axes: Any, heights: dict[float, Any], size: float, style: Row) -> None:
    """heights: by place"""
    curve = {}
    for left, height in heights.items():
        if height == "OOM":
            colour = style["color"]
            axes.plot(left, 0, "x", color=colour, markersize=size, clip_on=False)
        else:
            curve[left] = height
    line = {"markersize": size, "linewidth": size / 3}
    axes.plot(curve.keys(), curve.values(), "o-", **line, **style)


def _draw_bars(
    axes: Any, heights: dict[float, Any], width: float, dotted: bool, style: Row
) -> None:
    for left, height in heights.items():
        word = height
        if height == "OOM":
            height = 0
        else:
            word = f"{height:.{3 if height < 1000 else 4}g}"
        axes.bar(left, height, width, **style)
        place = {"y": height, "rotation": 90}
        if dotted:  # apart from the dots
            place = {"y": 0, "color": "white"}
        axes.text(left, s=f" {word}", ha="center", va="bottom", fontsize=7, **place)


def draw_placement(path: Path) -> None:
    """Figure 4: the stage of each GPU of two servers, coloured by pipeline, in both of
    Megatron's rank orders."""
    from matplotlib.patches import Rectangle

    figure = new_figure(9, 3.2)
    near_reductions, near_messages = figure.subplots(1, 2)
    near_reductions.set_title("Megatron's order: reductions stay inside", fontsize=10)
    near_messages.set_title("--use-tp-pp-dp-mapping: messages stay inside", fontsize=10)
    for axes in (near_reductions, near_messages):
        for rank in range(8):
            stage, pipeline = divmod(rank, 2)
            if axes is near_messages:
                pipeline, stage = divmod(rank, 4)
            y, x = divmod(rank, 4)
            axes.add_patch(Rectangle((x, y), 0.9, 0.8, color=f"C{pipeline}", alpha=0.4))
            text = f"rank {rank}\nstage {stage}"
            axes.text(x + 0.45, y + 0.4, text, ha="center", va="center")
        axes.set(xlim=(-0.1, 4), ylim=(2, -0.1), xticks=[])
        axes.set_yticks([0.4, 1.4], ["server 0", "server 1"])
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    figure.supxlabel("colours: the pipelines", fontsize=9)
    write_figure(path, figure)
