"""Two servers with a slow link: the bytes that each kind of parallelism sends over it, and the time that this costs.

    sudo .venv/bin/python bench/slow_links.py --json out/bench/slow_links.json

The servers are two network namespaces, joined by a veth whose rate `tc tbf` limits (bench/servers.py). A process on
each, pinned to its own core, trains the same GPT with the same global batch through the code path of
pretrain_gpt_2bw.py: tensor parallel, data parallel, and pipelines. The rate changes during the run, after a number of
iterations; --settle iterations after each change are left out. iteration_ms is the median of the others, from end to
end on server 0; sent_mb is the count of a server's interface in the median iteration, in the direction with more;
theory_mb is what the method has to send. slowdown compares with the same method on the unlimited link. simulated_ms is
the simulator's time, from the same schedule's iteration on the unlimited link and the measured time of a message.
2bw-ahead is 2bw with --two-bw-extra-warmup 1.
With --sleep-ms a server also sleeps in each microbatch's forward and backward, as long as a faster device would
compute: communication then has a free core, as with a GPU, and the figures hardly depend on the machine's other load.
Data-parallel servers sleep twice as long, since each has the whole model and half of the batch.
Writes the JSON and a picture of the same name. Linux, root, iproute2; a core for each server.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import new_parser, write_result
from bench.emulated import train
from bench.servers import ADDRESSES, BUCKET, INTERFACE, MTU, QUEUE, Servers, missing, sent_bytes
from megatron_2bw import run_log
from megatron_2bw.errors import UserError, names_of, run_program, words
from megatron_2bw.files import new_figure
from megatron_2bw.gpu_check.entry import gpt_flags
from megatron_2bw.local_ranks import WorldError, own_output, run_world
from megatron_2bw.processes import exit_on_signals
from megatron_2bw.schedules import TwoBW
from megatron_2bw.timelines.simulator import Times, iteration_time

AHEAD = {"2bw": 0, "2bw-ahead": 1}  # --two-bw-extra-warmup: more forwards ahead, which hide the messages
PIPELINES = ("megatron", "pipedream-flush", *AHEAD)
VARIANTS = {
    "tensor": "--tensor-model-parallel-size 2",
    "data": "--overlap-grad-reduce --ddp-num-buckets 8",  # the reduction overlaps the last backward
    **{name: f"--pipeline-model-parallel-size 2 --pipeline-schedule {name}" for name in PIPELINES},
}
VARIANTS["2bw-ahead"] = f"{VARIANTS['2bw']} --two-bw-extra-warmup {AHEAD['2bw-ahead']}"
FLOAT = 4  # bytes of a number: the model is trained in fp32


@dataclass
class Model:
    layers: int
    hidden: int
    heads: int
    sequence: int
    microbatch: int
    microbatches: int
    vocabulary: int  # with its padding

    @property
    def parameters(self) -> int:
        """Weights and biases of the layers, two norms in each, one behind them, and untied embeddings."""
        layer = 12 * self.hidden**2 + 13 * self.hidden
        return self.layers * layer + 2 * self.hidden + (2 * self.vocabulary + self.sequence) * self.hidden

    @property
    def message(self) -> int:
        """Bytes of a microbatch's activations between two layers."""
        return self.microbatch * self.sequence * self.hidden * FLOAT

    def theory(self, variant: str) -> float:
        """Bytes that a server has to send in an iteration, in either direction.

        An all-reduce of x bytes over n = 2 servers sends 2 (n - 1) / n x = x. Tensor parallelism reduces two of a
        layer's results in the forward and two gradients in the backward, and one each for the embedding and the
        output layer; data parallelism every gradient once.
        """
        if variant == "tensor":
            return (4 * self.layers + 2) * self.microbatches * self.message
        if variant == "data":
            return self.parameters * FLOAT
        return self.microbatches * self.message


@dataclass
class Link:
    """The speed of plain TCP on the link."""

    rate: str  # Mbit/s set in tbf, or "unlimited"
    measured_mbit: float
    message_ms: float  # of a microbatch's activations
    byte_us: float


Ends = list[tuple[float, int]]  # (seconds, bytes sent) at the end of each iteration
Row = dict[str, Any]


@dataclass
class Observed:
    """The ends of each rank's iterations, and the stages' bubbles by iteration."""

    ends: list[Ends]
    bubbles: dict[int, tuple[float, ...]]


def options() -> argparse.Namespace:
    parser = new_parser(__doc__, "slow_links")
    rates, pair = lambda text: tuple(map(float, words(text))), "sleep in each forward and backward"
    meaning = "Mbit/s in each direction, 1 to 4000, after the unlimited link"
    parser.add_argument("--rates", type=rates, default=(1000, 200, 50), metavar="MBIT,...", help=meaning)
    parser.add_argument("--variants", type=names_of(VARIANTS), default=list(VARIANTS), metavar="NAME,...")
    for name, size in {"layers": 8, "hidden": 512, "heads": 8, "sequence": 128, "micro-batch": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--microbatches", type=int, default=8, help="in a global batch")
    parser.add_argument("--iterations", type=int, default=3, help="measured at each rate")
    parser.add_argument("--settle", type=int, default=1, help="iterations left out after a change of the rate")
    parser.add_argument("--sleep-ms", type=rates, default=(0.0, 0.0), metavar="F,B", help=pair)
    chosen = parser.parse_args()
    if not all(1 <= rate <= 4000 for rate in chosen.rates):
        parser.error("--rates: give Mbit/s between 1 and 4000")
    if chosen.microbatches < 4 or chosen.layers % 2 or chosen.microbatches % 2 or chosen.heads % 2:
        parser.error(
            "--microbatches must be 4 at least, since 2bw-ahead runs two ahead, and even as --layers and --heads"
        )
    return chosen


def command(model: Model, variant: str, iterations: int) -> list[str]:
    text = f"""--untie-embeddings-and-output-weights --micro-batch-size {model.microbatch}
        --global-batch-size {model.microbatch * model.microbatches} --train-iters {iterations}
        --vocab-size {model.vocabulary - 1} --eval-interval 100000 --log-interval 1 {VARIANTS[variant]}"""
    return gpt_flags(model.layers, model.hidden, model.heads, model.sequence, text)


# --- a run ----------------------------------------------------------------------------------------------------------


def watch(servers: Servers, model: Model, variant: str, rates: list[str], chosen: argparse.Namespace) -> Observed:
    """One training run of `variant` over all rates, one after the other."""
    settle, iterations = chosen.settle, chosen.iterations
    sleep = [milliseconds / 1e3 * (2 if variant == "data" else 1) for milliseconds in chosen.sleep_ms]
    count = 2 + len(rates) * (settle + iterations) + 1  # the first two load code, the last one empties a pipeline
    changes = {first_of(number, settle, iterations) - settle: megabits(rate) for number, rate in enumerate(rates)}
    at_least = sum(model.theory(variant) * 8 / (limit * 1e6) for limit in changes.values() if limit)
    servers.limit(None)
    timeout = 300 + (settle + iterations) * (60 * len(rates) + 5 * at_least)
    arguments = (servers, command(model, variant, count), sleep, changes | {count - 1: None})
    results = run_world(2, run, *arguments, timeout=timeout)
    return Observed([ends for ends, _ in results], bubbles("\n".join(text for _, text in results)))


def run(
    rank: int, servers: Servers, argv: list[str], sleep: list[float], rates: Mapping[int, float | None]
) -> tuple[Ends, str]:
    """Train on server `rank`, on a core of its own; each microbatch's forward and backward also sleep. The ends of the
    iterations, and the output.

    rates: Mbit/s of the link, by the number of iterations before the change; None: no limit
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR=ADDRESSES[0], GLOO_SOCKET_IFNAME=INTERFACE)
    sent: list[int] = []

    def after_step(_losses: Any) -> None:
        sent.append(sent_bytes())
        if rank == 0 and len(sent) in rates:
            servers.limit(rates[len(sent)])

    with servers.inside(rank):
        observed = train(rank, argv, *sleep, after_step=after_step)
    return list(zip(observed.ends, sent)), own_output()


def bubbles(log: str) -> dict[int, tuple[float, ...]]:
    """The shares of the time that the stages waited, by iteration, from the ranks' output."""
    lines = [(line.iteration, line.fields["bubble"]) for line in run_log.training(log) if "bubble" in line.fields]
    return {number: tuple(float(share.rstrip("%")) / 100 for share in shares.split("/")) for number, shares in lines}


def first_of(number: int, settle: int, iterations: int) -> int:
    """Iterations that have ended before the measured ones at the number-th rate."""
    return 2 + number * (settle + iterations) + settle


def megabits(rate: str) -> float | None:
    return None if rate == "unlimited" else float(rate)


# --- the results --------------------------------------------------------------------------------------------------


def rows_of(
    variant: str, observed: Observed, model: Model, links: list[Link], settle: int, iterations: int
) -> list[Row]:
    """A row for each rate. spread_ms: the largest less the smallest of the iterations that iteration_ms is the median
    of; bubble: mean and largest share that a stage waited, from the log line."""
    rows: list[Row] = []
    for number, link in enumerate(links):
        start = first_of(number, settle, iterations) - 1
        took, sent = [], []
        for place in range(start, start + iterations):
            before, after = ([ends[at] for ends in observed.ends] for at in (place, place + 1))
            took.append(1e3 * (after[0][0] - before[0][0]))
            sent.append(max(b[1] - a[1] for a, b in zip(before, after)) / 1e6)
        shares = [observed.bubbles[i] for i in range(start + 2, start + 2 + iterations) if i in observed.bubbles]
        median = round(statistics.median(took), 1)
        row: Row = {"variant": variant, "rate": link.rate, "measured_mbit": link.measured_mbit, "iteration_ms": median}
        row |= {"spread_ms": round(max(took) - min(took), 1), "sent_mb": round(statistics.median(sent), 3)}
        row["slowdown"] = round(median / rows[0]["iteration_ms"], 3) if rows else 1.0
        row |= {"theory_mb": round(model.theory(variant) / 1e6, 3), "sent_by_2bw": "", "simulated_ms": ""}
        rows.append(row | {"bubble": " / ".join(f"{statistics.median(each):.3f}" for each in zip(*shares))})
    return rows


def compare(rows: list[Row], model: Model, links: list[Link]) -> None:
    """Fill in the ratio to the bytes of 2bw, and the simulated times: the forward half as long as the backward."""
    ours = {row["rate"]: row["sent_mb"] for row in rows if row["variant"] == "2bw"}
    for row in rows:
        if row["rate"] in ours:
            row["sent_by_2bw"] = round(row["sent_mb"] / ours[row["rate"]], 2)
    for variant, extra in AHEAD.items():
        own = [row for row in rows if row["variant"] == variant]
        for row, link in zip(own, links):
            cycle = own[0]["iteration_ms"] / model.microbatches  # on the unlimited link
            times = Times(cycle / 3, 2 * cycle / 3, transfer=link.message_ms, occupied=link.message_ms)
            schedule = TwoBW(extra_warmup=(extra,))
            row["simulated_ms"] = round(iteration_time(schedule, 2, model.microbatches, times), 1)


LINES = {  # of the picture: colour and name
    "tensor": ("#d94801", "tensor parallelism"),
    "data": ("#807dba", "data parallelism"),
    "megatron": ("#969696", "Megatron's 1F1B"),
    "pipedream-flush": ("#74c476", "PipeDream-Flush"),
    "2bw": ("#6baed6", "2BW"),
    "2bw-ahead": ("#08306b", "2BW, one more\nforward ahead"),
}


def draw(rows: list[Row]) -> Any:
    """Left: iteration times over the measured rate. Right: bytes per iteration, with the theory as lines."""
    figure = new_figure(10, 4.2)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    names = list(dict.fromkeys(row["variant"] for row in rows))
    for place, name in enumerate(names):
        own = [row for row in rows if row["variant"] == name]
        colour, label = LINES[name]
        rates, times = [row["measured_mbit"] for row in own], [row["iteration_ms"] / 1e3 for row in own]
        left.plot(rates, times, "o-", color=colour, label=label)
        right.bar(place, own[-1]["sent_mb"], color=colour)
        right.plot([place - 0.45, place + 0.45], [own[-1]["theory_mb"]] * 2, color="black", linewidth=1)
        right.text(place, own[-1]["sent_mb"] * 1.1, f"{own[-1]['sent_mb']:.3g}", ha="center", fontsize=8)
    links = {row["measured_mbit"]: row["rate"] for row in rows}
    left.set(xscale="log", xlabel="rate of the link (Mbit/s)", yscale="log", ylabel="iteration (s)")
    left.set_xticks(list(links), list(links.values()))
    left.set_xticks([], minor=True)
    left.set_yticks([2, 5, 10, 20], ["2", "5", "10", "20"])
    left.set_yticks([], minor=True)
    left.grid(which="both", linewidth=0.3)
    left.legend(fontsize=8)
    sent = [row["sent_mb"] for row in rows]
    right.set(yscale="log", ylim=(min(sent) / 3, 3 * max(sent)), ylabel="MB sent by a server in an iteration")
    right.set_title("black lines: what the method must send", fontsize=9)
    right.set_xticks(range(len(names)), [LINES[name][1] for name in names], rotation=30, ha="right", fontsize=8)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def show(row: Row) -> str:
    return (
        "{variant:16s} {rate:>9s} Mbit/s   iteration {iteration_ms:9.1f} ms   x {slowdown:6.2f}   "
        "sent {sent_mb:8.3f} MB (theory {theory_mb:8.3f})   bubble {bubble}".format(**row)
    )


def measure(servers: Servers, chosen: argparse.Namespace, model: Model) -> list[str]:
    """Measure all variants, write the results after each, and return what failed."""
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load_before": os.getloadavg()}
    result = {
        "machine": machine,
        "model": asdict(model) | {"parameters": model.parameters, "message_bytes": model.message},
        "sleep_ms": chosen.sleep_ms,
        "link": {"mtu": MTU, "tbf_burst_bytes": BUCKET, "tbf_limit_bytes": QUEUE},
        "links": [],
        "rows": [],
        "failures": [],
    }
    rates, links = ["unlimited", *(f"{rate:g}" for rate in chosen.rates)], []
    for rate in rates:
        servers.limit(megabits(rate))
        link = Link(rate, *(round(x, 3) for x in servers.measure(model.message, megabits=megabits(rate))))
        links.append(link)
        speed = f"{link.measured_mbit:.1f} Mbit/s of plain TCP, a microbatch's activations in {link.message_ms:.2f} ms"
        print(f"link {rate:>9s} Mbit/s: {speed}", flush=True)
    result["links"] = [asdict(link) for link in links]
    for variant in chosen.variants:
        try:
            observed = watch(servers, model, variant, rates, chosen)
        except WorldError as error:
            result["failures"].append(f"{variant}: {error}")
            print(result["failures"][-1], file=sys.stderr, flush=True)
            continue
        own = rows_of(variant, observed, model, links, chosen.settle, chosen.iterations)
        result["rows"] += own
        compare(result["rows"], model, links)
        print("\n".join(map(show, own)), flush=True)
        machine["load_after"] = os.getloadavg()  # includes the two ranks
        write_result(chosen.json, result, draw(result["rows"]))
    return result["failures"]


def main() -> int:
    chosen = options()
    exit_on_signals()  # so that `with` and `finally` run
    sizes = (chosen.layers, chosen.hidden, chosen.heads, chosen.sequence, chosen.micro_batch, chosen.microbatches)

    def work() -> int:
        if why := missing():
            raise UserError(why)
        with Servers() as servers:
            return 1 if measure(servers, chosen, Model(*sizes, vocabulary=1024)) else 0

    return run_program("slow_links.py", work)


if __name__ == "__main__":
    sys.exit(main())
