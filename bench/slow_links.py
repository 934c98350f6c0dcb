"""Two servers with a slow link: the bytes that each kind of parallelism sends over it,
and the time that this costs.

    sudo .venv/bin/python bench/slow_links.py --json out/bench/slow_links.json

The servers are two network namespaces, joined by a veth whose rate `tc tbf` limits
(bench/servers.py). A process on each, pinned to its own core, trains the same GPT with
the same global batch through the code path of pretrain_gpt_2bw.py: tensor parallel,
data parallel, and pipelines, each once at every rate. iteration_ms is the median of the
iterations in the steady state, from end to end on server 0; sent_mb is the count of a
server's interface in the median iteration, in the direction with more; theory_mb is
what the method has to send. slowdown compares with the same method on the unlimited
link. simulated_ms is the simulator's time, from the same schedule's iteration on the
unlimited link and the measured time of a message. 2bw-ahead is 2bw with
--two-bw-extra-warmup 1. With --sleep-ms a server also sleeps in each microbatch's
forward and backward, as long as a faster device would compute: communication then has a
free core, as with a GPU, and the figures hardly depend on the machine's other load.
Data-parallel servers sleep twice as long, since each has the whole model and half of
the batch. Writes the JSON and a picture of the same name. Linux, root, iproute2; a core
for each server.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import sys
from collections.abc import Container
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.emulated import train
from bench.servers import ADDRESSES, BUCKET, INTERFACE, MTU, QUEUE, Servers, sent_bytes
from bench.tables import new_parser, write_result
from megatron_2bw.base import run_log
from megatron_2bw.base.errors import names_of, run_program, words
from megatron_2bw.base.files import new_figure
from megatron_2bw.base.local_ranks import WorldError, own_output, run_world
from megatron_2bw.base.processes import exit_on_signals
from megatron_2bw.schedules import TwoBW
from megatron_2bw.tools.gpu_check.entry import gpt_flags
from megatron_2bw.tools.planner.descriptions.model import Model
from megatron_2bw.tools.timelines.simulator import Times, iteration_time

# --two-bw-extra-warmup: more forwards ahead, which hide the messages
AHEAD = {"2bw": 0, "2bw-ahead": 1}
PIPELINES = ("megatron", "pipedream-flush", *AHEAD)
VARIANTS = {
    "tensor": "--tensor-model-parallel-size 2",
    # the reduction overlaps the last backward
    "data": "--overlap-grad-reduce --ddp-num-buckets 8",
    **{
        name: f"--pipeline-model-parallel-size 2 --pipeline-schedule {name}"
        for name in PIPELINES
    },
}
VARIANTS["2bw-ahead"] = f"{VARIANTS['2bw']} --two-bw-extra-warmup {AHEAD['2bw-ahead']}"
FLOAT = 4  # bytes of a number: the model is trained in fp32
VOCABULARY = 1024  # with its padding
SIZES = {
    "layers": 8,
    "hidden": 512,
    "heads": 8,
    "sequence": 128,
    "micro-batch": 1,
    "microbatches": 8,
}


def message(chosen: argparse.Namespace) -> int:
    """Bytes of a microbatch's activations between two layers."""
    return chosen.micro_batch * chosen.sequence * chosen.hidden * FLOAT


def parameters(chosen: argparse.Namespace) -> int:
    sizes = {"vocab": VOCABULARY, "sequence": chosen.sequence, "tied": False}
    return Model(
        "any", chosen.layers, chosen.hidden, chosen.heads, **sizes
    ).parameters()


def theory(variant: str, chosen: argparse.Namespace) -> int:
    """Bytes that a server has to send in an iteration, in either direction.

    An all-reduce of x bytes over n = 2 servers sends 2 (n - 1) / n x = x. Tensor
    parallelism reduces two of a layer's results in the forward and two gradients in the
    backward, and one each for the embedding and the output layer; data parallelism
    every gradient once.
    """
    if variant == "tensor":
        return (4 * chosen.layers + 2) * chosen.microbatches * message(chosen)
    return (
        parameters(chosen) * FLOAT
        if variant == "data"
        else chosen.microbatches * message(chosen)
    )


@dataclass
class Link:
    """The speed of plain TCP on the link."""

    rate: str  # Mbit/s set in tbf, or "unlimited"
    measured_mbit: float
    message_ms: float  # of a microbatch's activations


Row = dict[str, Any]


def options() -> argparse.Namespace:
    parser = new_parser(__doc__, "slow_links")
    rates, pair = (
        lambda text: tuple(map(float, words(text))),
        "sleep in each forward and backward",
    )
    meaning = "Mbit/s in each direction, 1 to 4000, after the unlimited link"
    parser.add_argument(
        "--rates", type=rates, default=(1000, 200, 50), metavar="MBIT,...", help=meaning
    )
    parser.add_argument(
        "--variants",
        type=names_of(VARIANTS),
        default=list(VARIANTS),
        metavar="NAME,...",
    )
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument(
        "--iterations", type=int, default=3, help="measured at each rate"
    )
    parser.add_argument(
        "--sleep-ms", type=rates, default=(0.0, 0.0), metavar="F,B", help=pair
    )
    return parser.parse_args()


def command(chosen: argparse.Namespace, variant: str, iterations: int) -> list[str]:
    text = f"""--untie-embeddings-and-output-weights --micro-batch-size {chosen.micro_batch}
        --global-batch-size {chosen.micro_batch * chosen.microbatches} --train-iters {iterations}
        --vocab-size {VOCABULARY - 1} --eval-interval 100000 --log-interval 1 {VARIANTS[variant]}"""
    return gpt_flags(chosen.layers, chosen.hidden, chosen.heads, chosen.sequence, text)


def run(
    rank: int, servers: Servers, argv: list[str], sleep: list[float]
) -> tuple[list[float], list[int], str]:
    """Train on server `rank`, on a core of its own; each microbatch's forward and
    backward also sleep. The seconds and the bytes sent at the ends of the iterations,
    and the output."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ.update(
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR=ADDRESSES[0],
        GLOO_SOCKET_IFNAME=INTERFACE,
    )
    sent: list[int] = []
    with servers.inside(rank):
        observed = train(
            rank, argv, *sleep, after_step=lambda _losses: sent.append(sent_bytes())
        )
    return observed.ends, sent, own_output()


def watch(
    servers: Servers, variant: str, link: Link, chosen: argparse.Namespace
) -> Row:
    """The row of `variant` at one rate. spread_ms: the largest less the smallest of the
    iterations that iteration_ms is the median of; bubble: the share that each stage
    waited, from the log line."""
    sleep = [
        milliseconds / 1e3 * (2 if variant == "data" else 1)
        for milliseconds in chosen.sleep_ms
    ]
    # the first three fill the pipeline, the last empties it
    limit, count = megabits(link.rate), chosen.iterations + 4
    servers.limit(limit)
    at_least = theory(variant, chosen) * 8 / (limit * 1e6) if limit else 0.0
    timeout = 300 + count * (60 + 5 * at_least)
    results = run_world(
        2, run, servers, command(chosen, variant, count), sleep, timeout=timeout
    )
    took = [
        1e3 * (after - before)
        for before, after in itertools.pairwise(results[0][0][2:-1])
    ]
    sent = [
        max(after - before for before, after in zip(*pair)) / 1e6
        for pair in steps(results)
    ]
    shares = bubbles(
        "\n".join(text for *_, text in results), range(4, 4 + chosen.iterations)
    )
    row: Row = {
        "variant": variant,
        "rate": link.rate,
        "measured_mbit": link.measured_mbit,
    }
    row |= {
        "iteration_ms": round(statistics.median(took), 1),
        "spread_ms": round(max(took) - min(took), 1),
    }
    row |= {"slowdown": 1.0, "sent_mb": round(statistics.median(sent), 3)}
    row |= {
        "theory_mb": round(theory(variant, chosen) / 1e6, 3),
        "sent_by_2bw": "",
        "simulated_ms": "",
    }
    return row | {
        "bubble": " / ".join(f"{statistics.median(each):.3f}" for each in zip(*shares))
    }


def steps(
    results: list[tuple[list[float], list[int], str]],
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Both servers' bytes before and after each measured iteration."""
    return list(itertools.pairwise(zip(*(sent[2:-1] for _, sent, _ in results))))


def bubbles(log: str, iterations: Container[int]) -> list[tuple[float, ...]]:
    """The shares of the time that the stages waited in these iterations, from the
    ranks' output."""
    lines = [
        line.fields.get("bubble", "")
        for line in run_log.training(log)
        if line.iteration in iterations
    ]
    return [
        tuple(float(share.rstrip("%")) / 100 for share in shares.split("/"))
        for shares in lines
        if shares
    ]


def megabits(rate: str) -> float | None:
    return None if rate == "unlimited" else float(rate)


# --- the results
# --------------------------------------------------------------------------------------


def compare(rows: list[Row], microbatches: int, links: list[Link]) -> None:
    """Fill in the ratios to the bytes of 2bw and to the unlimited link, and the
    simulated times: the forward half as long as the backward."""
    ours = {row["rate"]: row["sent_mb"] for row in rows if row["variant"] == "2bw"}
    free = {row["variant"]: row["iteration_ms"] for row in reversed(rows)}
    for row in rows:
        row["slowdown"] = round(row["iteration_ms"] / free[row["variant"]], 3)
        if row["rate"] in ours:
            row["sent_by_2bw"] = round(row["sent_mb"] / ours[row["rate"]], 2)
    for variant, extra in AHEAD.items():
        own = [row for row in rows if row["variant"] == variant]
        for row in own:
            (link,) = [link for link in links if link.rate == row["rate"]]
            cycle = own[0]["iteration_ms"] / microbatches  # on the unlimited link
            times = Times(
                cycle / 3,
                2 * cycle / 3,
                transfer=link.message_ms,
                occupied=link.message_ms,
            )
            schedule = TwoBW(extra_warmup=(extra,))
            row["simulated_ms"] = round(
                iteration_time(schedule, 2, microbatches, times), 1
            )


def draw(rows: list[Row]) -> Any:
    """Left: iteration times over the measured rate. Right: bytes per iteration, with
    the theory as black dots."""
    figure = new_figure(8.5, 4)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    names = list(dict.fromkeys(row["variant"] for row in rows))
    for place, (name, colour) in enumerate(
        zip(names, "#bbb #777 #e69f00 #00664c #56b4e9 #0072b2".split())
    ):
        own = [row for row in rows if row["variant"] == name]
        rates, times = (
            [row["measured_mbit"] for row in own],
            [row["iteration_ms"] / 1e3 for row in own],
        )
        left.plot(rates, times, "o-", color=colour, label=name)
        right.bar_label(
            right.bar(place, own[-1]["sent_mb"], color=colour), fmt="%.3g", fontsize=8
        )
        right.plot(place, own[-1]["theory_mb"], "ko", markersize=3)
    links = {row["measured_mbit"]: row["rate"] for row in rows}
    left.set(
        xscale="log",
        xlabel="rate of the link (Mbit/s)",
        yscale="log",
        ylabel="iteration (s)",
    )
    left.set_xticks(list(links), list(links.values()))
    left.set_xticks([], minor=True)
    left.yaxis.set_minor_formatter("{x:g}")
    left.grid(which="both", linewidth=0.3)
    left.legend(fontsize=8)
    right.set(yscale="log", ylabel="MB sent in an iteration; dots: theory")
    right.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.yaxis.set_major_formatter("{x:g}")
    return figure


def measure(servers: Servers, chosen: argparse.Namespace) -> list[str]:
    """Measure all variants, write the results after each, and return what failed."""
    sizes = {
        name.replace("-", "_"): getattr(chosen, name.replace("-", "_"))
        for name in SIZES
    }
    result = {
        "machine": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load_before": os.getloadavg(),
        },
        "model": sizes
        | {"parameters": parameters(chosen), "message_bytes": message(chosen)},
        "sleep_ms": chosen.sleep_ms,
        "link": {"mtu": MTU, "tbf_burst_bytes": BUCKET, "tbf_limit_bytes": QUEUE},
        "links": [],
        "rows": [],
        "failures": [],
    }
    rates, links = ["unlimited", *(f"{rate:g}" for rate in chosen.rates)], []
    for rate in rates:
        servers.limit(megabits(rate))
        measured = servers.rate(megabits(rate))
        link = Link(
            rate, round(measured, 3), round(message(chosen) * 8 / measured / 1e3, 3)
        )
        links.append(link)
        speed = (
            f"{link.measured_mbit:.1f} Mbit/s of plain TCP, a microbatch's "
            f"activations in {link.message_ms:.2f} ms"
        )
        print(f"link {rate:>9s} Mbit/s: {speed}", flush=True)
    result["links"] = [asdict(link) for link in links]
    for variant, link in itertools.product(chosen.variants, links):
        try:
            result["rows"].append(watch(servers, variant, link, chosen))
        except WorldError as error:
            result["failures"].append(f"{variant}: {error}")
            print(result["failures"][-1], file=sys.stderr, flush=True)
            continue
        compare(result["rows"], chosen.microbatches, links)
        print(
            ", ".join(f"{name} {value}" for name, value in result["rows"][-1].items()),
            flush=True,
        )
        write_result(chosen.json, result, draw(result["rows"]))
    return result["failures"]


def main() -> int:
    chosen = options()
    exit_on_signals()  # so that `with` and `finally` run

    def work() -> int:
        with Servers() as servers:
            return 1 if measure(servers, chosen) else 0

    return run_program("slow_links.py", work)


if __name__ == "__main__":
    sys.exit(main())
