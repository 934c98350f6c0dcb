"""Two servers with a slow link: the bytes that each kind of parallelism sends over it,
and the time that this costs.

    sudo .venv/bin/python bench/slow_links.py

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
the batch. Writes the JSON and a picture of the same name. Linux, root, iproute2; a core for
each server.
"""

import itertools
import os
import platform
import sys
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from bench.emulated import train
from bench.servers import ADDRESSES, INTERFACE, Servers, sent_bytes
from bench.tables import Row, new_parser, write_result
from megatron_2bw.base import run_log
from megatron_2bw.base.errors import comma_separated, list_of, run_program
from megatron_2bw.base.files import new_figure
from megatron_2bw.base.local_ranks import own_output, run_world
from megatron_2bw.base.processes import exit_on_signals
from megatron_2bw.schedules import TwoBW
from megatron_2bw.tools.gpu_check.entry import gpt_flags
from megatron_2bw.tools.planner.descriptions.model import Model
from megatron_2bw.tools.timelines.simulator import Times, iteration_time

PIPELINE = "--pipeline-model-parallel-size 2 --pipeline-schedule"
TWO_BW = f"{PIPELINE} 2bw --two-bw-late all --two-bw-correction none"
VARIANTS = {
    "tensor": "--tensor-model-parallel-size 2",
    # the reduction overlaps the last backward
    "data": "--overlap-grad-reduce --ddp-num-buckets 8",
    "megatron": f"{PIPELINE} megatron",
    "pipedream-flush": f"{PIPELINE} pipedream-flush",
    "2bw": TWO_BW,
    # more forwards ahead, which hide the messages
    "2bw-ahead": f"{TWO_BW} --two-bw-extra-warmup 1",
}
COLOURS = ("#bbb", "#777", "#e69f00", "#00664c", "#56b4e9", "#0072b2")
FLOAT = 4  # bytes of a number: the model is trained in fp32
VOCABULARY = 1024  # with its padding
SIZES = {
    "layers": 8,
    "hidden": 512,
    "heads": 8,
    "sequence": 128,
    "microbatches": 8,
}


def model_of(chosen: Namespace) -> Row:
    """The sizes; the numbers of parameters, and of bytes of a microbatch's activations
    between two layers."""
    sizes = {name: getattr(chosen, name) for name in SIZES}
    shape = (chosen.layers, chosen.hidden, chosen.heads, VOCABULARY, chosen.sequence)
    sizes["parameters"] = Model("any", *shape, tied=False).parameters()
    sizes["message_bytes"] = chosen.sequence * chosen.hidden * FLOAT
    return sizes


def theory(variant: str, chosen: Namespace) -> int:
    """Bytes that a server has to send in an iteration, in either direction.

    An all-reduce of x bytes over n = 2 servers sends 2 (n - 1) / n x = x. Tensor
    parallelism reduces two of a layer's results in the forward and two gradients in the
    backward, and one each for the embedding and the output layer; data parallelism
    every gradient once.
    """
    model = model_of(chosen)
    if variant == "data":
        return model["parameters"] * FLOAT
    sent = chosen.microbatches * model["message_bytes"]
    return sent * (4 * chosen.layers + 2) if variant == "tensor" else sent


@dataclass
class Link:
    """The speed of plain TCP on the link."""

    rate: str  # Mbit/s set in tbf, or "unlimited"
    measured_mbit: float
    message_ms: float  # of a microbatch's activations


def floats(text: str) -> tuple[float, ...]:
    return tuple(map(float, comma_separated(text)))


def options() -> Namespace:
    parser = new_parser(__doc__, "slow_links")
    option = parser.add_argument
    meaning = "Mbit/s in each direction, 1 to 4000, after the unlimited link"
    rates = (1000, 200, 50)
    option("--rates", type=floats, default=rates, metavar="MBIT,...", help=meaning)
    every = list(VARIANTS)
    option("--variants", type=list_of(every), default=every, metavar="NAME,...")
    for name, size in SIZES.items():
        option(f"--{name.replace('_', '-')}", type=int, default=size)
    option("--iterations", type=int, default=3, help="measured at each rate")
    meaning = "sleep in each forward and backward"
    option("--sleep-ms", type=floats, default=(0.0, 0.0), metavar="F,B", help=meaning)
    return parser.parse_args()


def command(chosen: Namespace, variant: str, iterations: int) -> list[str]:
    text = f"""--untie-embeddings-and-output-weights --global-batch-size {chosen.microbatches}
        --train-iters {iterations} --vocab-size {VOCABULARY - 1} --eval-interval 100000 --log-interval 1
        {VARIANTS[variant]}"""
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
    sent = []

    def after_step(losses) -> None:
        sent.append(sent_bytes())

    with servers.inside(rank):
        observed = train(rank, argv, *sleep, after_step=after_step)
    return observed.ends, sent, own_output()


def watch(servers: Servers, variant: str, link: Link, chosen: Namespace) -> Row:
    """The row of `variant` at one rate. spread_ms: the largest less the smallest of the
    iterations that iteration_ms is the median of; bubble: the share that each stage
    waited, from the log line."""
    copies = 2 if variant == "data" else 1  # of the whole model
    forward, backward = chosen.sleep_ms
    sleep = [forward / 1e3 * copies, backward / 1e3 * copies]
    # the first three fill the pipeline, the last empties it
    count = chosen.iterations + 4
    expected = theory(variant, chosen)
    timeout = 300 + count * 60
    limit = megabits(link.rate)
    if limit:
        timeout += count * 5 * expected * 8 / (limit * 1e6)
    servers.limit(limit)
    argv = command(chosen, variant, count)
    results = run_world(2, run, servers, argv, sleep, timeout=timeout)
    ends, bytes_sent, texts = zip(*results)
    took = 1e3 * np.diff(ends[0][2:-1])
    by_server = np.array(bytes_sent)[:, 2:-1]
    sent = np.diff(by_server).max(axis=0) / 1e6
    log = "\n".join(texts)
    return {
        "variant": variant,
        "rate": link.rate,
        "measured_mbit": link.measured_mbit,
        "iteration_ms": round(np.median(took), 1),
        "spread_ms": round(np.ptp(took), 1),
        "slowdown": 1.0,
        "sent_mb": round(np.median(sent), 3),
        "theory_mb": round(expected / 1e6, 3),
        "sent_by_2bw": "",
        "simulated_ms": "",
        "bubble": bubbles(log, range(4, count)),
    }


def bubbles(log: str, iterations: range) -> str:
    """Each stage's median share of the time that it waited in these iterations, from
    the ranks' output."""
    shares = []
    for line in run_log.training(log):
        text = line.fields.get("bubble")
        if text and line.iteration in iterations:
            percent = text.replace("%", "").split("/")
            shares.append(np.array(percent, float) / 100)
    medians = np.median(shares, axis=0) if shares else ()
    return " / ".join(map("{:.3f}".format, medians))


def megabits(rate: str) -> float | None:
    return None if rate == "unlimited" else float(rate)


# --- the results
# --------------------------------------------------------------------------------------


def compare(rows: list[Row], microbatches: int, links: list[Link]) -> None:
    """Fill in the ratios to the bytes of 2bw and to the unlimited link, and the
    simulated times: the forward half as long as the backward."""
    ours = {}
    for row in rows:
        if row["variant"] == "2bw":
            ours[row["rate"]] = row["sent_mb"]
    messages = {link.rate: link.message_ms for link in links}
    free = {}  # on the unlimited link, which comes first
    for row in rows:
        variant = row["variant"]
        rate = row["rate"]
        alone = free.setdefault(variant, row["iteration_ms"])
        row["slowdown"] = round(row["iteration_ms"] / alone, 3)
        if rate in ours:
            row["sent_by_2bw"] = round(row["sent_mb"] / ours[rate], 2)
        if variant.startswith("2bw"):
            third = alone / microbatches / 3
            message = messages[rate]
            times = Times(third, 2 * third, transfer=message, occupied=message)
            schedule = TwoBW(extra_warmup=(int(variant == "2bw-ahead"),))
            simulated = iteration_time(schedule, 2, microbatches, times)
            row["simulated_ms"] = round(simulated, 1)


def draw(rows: list[Row]) -> Any:
    """Left: iteration times over the measured rate. Right: bytes per iteration, with
    the theory as black dots."""
    figure = new_figure(8.5, 4)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    links = {}
    times = {}  # of each variant, by rate
    last = {}
    for row in rows:
        name = row["variant"]
        rate = row["measured_mbit"]
        links[rate] = row["rate"]
        times.setdefault(name, {})[rate] = row["iteration_ms"] / 1e3
        last[name] = row
    names = list(times)
    for place, (name, colour) in enumerate(zip(names, COLOURS)):
        curve = times[name]
        left.plot(curve.keys(), curve.values(), "o-", color=colour, label=name)
        bar = right.bar(place, last[name]["sent_mb"], color=colour)
        right.bar_label(bar, fmt="%.3g", fontsize=8)
        right.plot(place, last[name]["theory_mb"], "ko", markersize=3)
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


def measured_link(servers: Servers, rate: str, chosen: Namespace) -> Link:
    servers.limit(megabits(rate))
    measured = servers.rate(megabits(rate))
    milliseconds = model_of(chosen)["message_bytes"] * 8 / measured / 1e3
    speed = f"{measured:.1f} Mbit/s of plain TCP, a microbatch's activations in {milliseconds:.2f} ms"
    print(f"link {rate:>9s} Mbit/s: {speed}", flush=True)
    return Link(rate, round(measured, 3), round(milliseconds, 3))


def measure(servers: Servers, chosen: Namespace) -> None:
    """Measure all variants, and write the results after each."""
    load = os.getloadavg()
    links = [measured_link(servers, "unlimited", chosen)]
    for rate in chosen.rates:
        links.append(measured_link(servers, f"{rate:g}", chosen))
    rows = []
    result = {
        "machine": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load_before": load,
        },
        "model": model_of(chosen),
        "sleep_ms": chosen.sleep_ms,
        "links": [asdict(link) for link in links],
        "rows": rows,
    }
    for variant, link in itertools.product(chosen.variants, links):
        rows.append(watch(servers, variant, link, chosen))
        compare(rows, chosen.microbatches, links)
        print(rows[-1], flush=True)
        write_result(chosen.json, result, draw(rows))


def main() -> int:
    chosen = options()
    exit_on_signals()  # so that `with` and `finally` run

    def work() -> None:
        with Servers() as servers:
            measure(servers, chosen)

    return run_program("slow_links.py", work)


if __name__ == "__main__":
    sys.exit(main())
