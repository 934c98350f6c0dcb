"""megatron-2bw plan: the command line of the planner.

Invariant: bad input ends with status 2 and one line that names the flag. Every printed
plan is legal and fits.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from megatron_2bw.base.argv import expand_files
from megatron_2bw.base.errors import (
    Parser,
    UserError,
    file_errors,
    names_of,
    usage_error,
    whole,
)
from megatron_2bw.base.files import write_json
from megatron_2bw.run.flags.project_flags import schedule_name
from megatron_2bw.schedules import SCHEDULE_NAMES
from megatron_2bw.tools.planner import other_commands
from megatron_2bw.tools.planner.cost.simulated import Cost, Estimate
from megatron_2bw.tools.planner.descriptions import inputs
from megatron_2bw.tools.planner.descriptions.cluster import INFINIBAND, network
from megatron_2bw.tools.planner.descriptions.cluster import PRESETS as CLUSTERS
from megatron_2bw.tools.planner.find import advice
from megatron_2bw.tools.planner.find.legality import PRECISIONS
from megatron_2bw.tools.planner.find.search import Search
from megatron_2bw.tools.planner.find.space import BLOCK, PLANNED, RECOMPUTES, Space
from megatron_2bw.tools.planner.measure import blocks
from megatron_2bw.tools.planner.tell import (
    explain,
    jobs,
    json_out,
    rejections,
    report,
    training,
)

EXAMPLE = (
    "megatron-2bw plan --model gpt-2.2b --cluster p3.16xlarge --servers 8 "
    "--max-global-batch-size 512"
)


def main(argv: Sequence[str] | None = None, prog: str = "megatron-2bw plan") -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    commands = {
        "plan": run_plan,
        "profile": run_profile,
        "calibrate": other_commands.run_calibrate,
    }
    name = words.pop(0) if words and words[0] in commands else "plan"
    prog += "" if name == "plan" else f" {name}"
    try:
        return commands[name](expand_files(words), prog)
    except UserError as error:
        return 2 if error.reported_elsewhere else usage_error(prog, error)
    except BrokenPipeError:  # the reader of the output has ended, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser(prog: str) -> Parser:
    """The choices have the names of Space's fields."""
    others = "Other commands: profile, calibrate (megatron-2bw plan COMMAND --help)."
    description = f"The fastest configuration that fits. Example: {EXAMPLE}"
    parser = Parser(
        prog=prog, description=description, epilog=others, allow_abbrev=False
    )
    inputs.add_model_flags(parser)
    add = parser.add_argument_group("cluster").add_argument
    add("--cluster", required=True, metavar="NAME|FILE.yaml", help=", ".join(CLUSTERS))
    add("--servers", type=whole(1), help="default: of the YAML file, or 1")
    rates = (
        "network of a server, instead of the cluster's: 100gbit, 25gbe, 8x400gbit, "
        + ", ".join(INFINIBAND)
    )
    add("--link", type=network, metavar="RATE", help=rates)
    add(
        "--gpus-per-server",
        type=whole(1),
        help="at most as many as the cluster's servers have",
    )
    add(
        "--profile",
        type=Path,
        metavar="FILE.json",
        help="measured times, from `megatron-2bw plan profile`",
    )

    add = parser.add_argument_group("choices of the search").add_argument
    safe = "the largest global batch, in samples, that is safe for convergence"
    add(
        "--max-global-batch-size",
        dest="batch",
        type=whole(1),
        required=True,
        metavar="N",
        help=safe,
    )
    known = f"of {', '.join(SCHEDULE_NAMES)} (1f1b is pipedream-flush)"
    add(
        "--schedules",
        type=names_of(SCHEDULE_NAMES, schedule_name),
        default=PLANNED,
        metavar="NAME,...",
        help=known,
    )
    sizes = dict(type=inputs.numbers, metavar="N,...")
    add(
        "--tensor-model-parallel-size",
        dest="tensor",
        **sizes,
        help="default: all that are legal",
    )
    add(
        "--pipeline-model-parallel-size",
        dest="depth",
        **sizes,
        help="default: all that are legal",
    )
    add(
        "--micro-batch-size",
        dest="microbatch",
        **sizes,
        help="default: all that are legal",
    )
    sequences = "ranks that share a sequence (default: 1, or all that are legal if no plan fits)"
    add("--context-parallel-size", dest="context", **sizes, help=sequences)
    add(
        "--expert-model-parallel-size",
        dest="expert",
        **sizes,
        help="default: all that are legal",
    )
    known = f"of {', '.join(RECOMPUTES)} (default: these), {BLOCK}"
    add(
        "--recompute",
        type=names_of((*RECOMPUTES, BLOCK)),
        default=RECOMPUTES,
        metavar="NAME,...",
        help=known,
    )
    slots = dict(type=names_of((1, 2), whole(1)), default=(2, 1))
    add("--gradient-slots", **sizes | slots, help="of 2bw: 2, 1 or both")
    hidden = "by default 2bw hides messages on slow links by extra warm-up"
    add("--no-extra-warmup", dest="extra_warmup", action="store_false", help=hidden)
    host = "by default 2bw's optimizer is in host memory where a plan does not fit otherwise"
    add("--no-host-optimizer", dest="host", action="store_false", help=host)
    correction = (
        "2bw with --two-bw-correction auto, whose step needs more memory (default: yes)"
    )
    add(
        "--extrapolate",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=correction,
    )
    replicated = dict(
        dest="distributed_optimizer",
        action="store_const",
        const=(False,),
        default=(False, True),
    )
    add(
        "--no-distributed-optimizer",
        **replicated,
        help="by default the search tries both",
    )
    tensor = "with tensor parallelism, as on the CPU"
    add(
        "--no-sequence-parallel",
        dest="sequence_parallel",
        action="store_false",
        help=tensor,
    )
    even = "by default first and last stage may differ from the others"
    add("--no-uneven-stages", dest="uneven", action="store_false", help=even)

    add = parser.add_argument_group("cost and memory").add_argument
    default = "default: bf16, or fp16 on GPUs without bf16, fp32 on CPUs"
    add("--precision", choices=PRECISIONS, help=default)
    add(
        "--grad-reduce-in-bf16", action="store_true", help="of all plans, as Megatron's"
    )
    add(
        "--attention",
        choices=("flash", "core"),
        help="default: flash in 16 bits, on GPUs that have it",
    )
    adam = (
        "fused: Apex's or Transformer Engine's (default: of --profile, or fused "
        "where attention is flash)"
    )
    add("--adam", choices=("fused", "torch"), help=adam)
    margin = "share of the memory that stays free (default: what CUDA, NCCL and fragmentation take)"
    add("--memory-margin", type=float, metavar="SHARE", help=margin)
    add(
        "--top",
        type=whole(1),
        default=8,
        metavar="K",
        help="number of plans (default: 8)",
    )

    add = parser.add_argument_group("files").add_argument
    add("--json", type=Path, metavar="FILE", help="all printed figures, and more")
    add(
        "--script",
        type=Path,
        metavar="FILE.sh",
        help="the best plan as a torchrun command",
    )
    add(
        "--sbatch",
        type=Path,
        metavar="FILE.sbatch",
        help="the best plan as a Slurm job",
    )
    add(
        "--report",
        type=Path,
        metavar="DIR",
        help="a page with all plans: timeline, memory, throughput by memory",
    )
    return parser


def prepare(options: argparse.Namespace) -> tuple[Cost, Space]:
    """The cost model and the space that the flags describe."""
    model, cluster = inputs.model_of(options), inputs.cluster_of(options)
    on_cpu, profile = cluster.device.name == "cpu", cluster.profile
    precision = "fp32" if on_cpu else "bf16" if cluster.device.bf16 else "fp16"
    precision = options.precision or (profile.precision if profile else precision)
    if profile and (fault := profile.fits(model, precision)):
        raise UserError(f"--profile: {fault}; measure this model")
    if options.attention == "flash" and (
        precision == "fp32" or not cluster.device.flash
    ):
        raise UserError(
            f"--attention flash: {cluster.device.name} has none in {precision}; leave it out"
        )
    flash = (
        False
        if on_cpu
        else {None: None, "flash": True, "core": False}[options.attention]
    )
    if not 0 <= (options.memory_margin or 0) < 1:
        raise UserError(
            f"--memory-margin {options.memory_margin:g}: give a share, from 0 to less than 1"
        )
    spare = advice.SPARE if options.memory_margin is None else 0.0
    cost = Cost(model, cluster, precision, flash, options.memory_margin, spare=spare)
    if options.adam or not (profile or cost.memory.flash):
        cost.memory.torch_adam = not on_cpu and options.adam != "fused"
    if max(options.context or (1,)) > 1 and not cost.memory.flash:
        raise UserError(
            "--context-parallel-size needs flash attention, of Transformer "
            "Engine on GPUs: leave it out"
        )
    chosen = {
        field.name: getattr(options, field.name)
        for field in fields(Space)
        if hasattr(options, field.name)
    }
    chosen |= {
        "sequence_parallel": options.sequence_parallel and not on_cpu,
        "context": options.context or (1,),
    }
    return cost, Space(**chosen)


def planned(options: argparse.Namespace) -> explain.Result | None:
    """The plans of the cluster, or of a part of it that is faster."""
    cost, space = prepare(options)
    result = _searched(cost, space, options)
    if result and result.fewer:
        part, given = result.fewer, cost.cluster.gpus
        idle = f"{given - part.gpus} of {given} GPUs stay idle"
        print(
            f"{idle}: {part.gpus} are faster ({explain.part_flags(part)})",
            file=sys.stderr,
        )
        result = _searched(cost.on(part), space, options)
    return result


def _searched(
    cost: Cost, space: Space, options: argparse.Namespace
) -> explain.Result | None:
    """Search, and estimate the fastest plans. If no plan fits, print the reason and
    return None."""
    begun = time.monotonic()
    print(
        f"searching the plans of {cost.model.name} on {explain.gpus(cost)} ...",
        file=sys.stderr,
        flush=True,
    )
    shares = dict.fromkeys((cost.spare, 0.0))
    spaces = [space] + [replace(space, context=None)] * (
        options.context is None and cost.memory.flash
    )
    ways = [(share, each) for each in spaces for share in shares] + [
        (-advice.TIGHT, space)
    ]
    searches = [
        Search(cost.on(cost.cluster, spare=share), each) for share, each in ways
    ]
    for search in searches:
        plans, ties = advice.ranked(search, options.top)
        if plans:
            break
    else:
        print(rejections.nothing_fits(cost, space, searches[0]))
        return None
    if search.space.context is None:
        print(
            "nothing fits without context parallelism: planned is --context-parallel-size too",
            file=sys.stderr,
        )
    if search.cost.spare < 0:
        print(
            (
                "no plan fits by the estimate; these are at most "
                f"{100 * advice.TIGHT:g} % above the memory"
            ),
            file=sys.stderr,
        )
    elif search.cost.spare < cost.spare:
        print(
            f"no plan leaves {100 * cost.spare:g} % of the memory free: they may run out",
            file=sys.stderr,
        )
    seconds, cost = time.monotonic() - begun, search.cost
    return explain.Result(
        cost,
        search.space,
        [cost.estimate(plan) for plan in plans],
        search,
        seconds,
        ties,
    )


def run_plan(words: list[str], prog: str) -> int:
    options = _parser(prog).parse_args(words)
    result = planned(options)
    if result is None:
        return 1
    cost, best = result.cost, result.estimates[0]
    print(
        explain.text(result),
        rejections.rejections(result),
        explain.evidence(cost),
        explain.CAVEAT,
        sep="\n\n",
    )
    print("\nA run of the first plan, as --script and --sbatch write it:")
    print(*map(explain.wrapped, training.about(cost, best)), sep="\n")
    print(
        "\nFlags of the first plan:\n  "
        f"{shlex.join([*cost.model.flags(), *best.plan.flags(cost.precision)])}"
    )
    _write(options, result)
    return 0


def _write(options: argparse.Namespace, result: explain.Result) -> None:
    """Write the files that the flags name."""
    cost, best = result.cost, result.estimates[0]
    if options.script:
        jobs.write(options.script, jobs.torchrun_script(cost, best), "--script")
    if options.sbatch:
        jobs.write(
            options.sbatch, jobs.sbatch_script(cost, best, cost.model.name), "--sbatch"
        )
    if options.report:
        report.write_report(cost, result.estimates, _cloud(result), options.report)
    if options.json:
        with file_errors(f"--json {options.json}"):
            options.json.parent.mkdir(parents=True, exist_ok=True)
            write_json(options.json, json_out.as_json(result))
    for path in filter(
        None, (options.script, options.sbatch, options.report, options.json)
    ):
        print(f"wrote {path}", file=sys.stderr)


def _cloud(result: explain.Result, each: int = 20) -> list[Estimate]:
    """More plans for the page: the fastest of every schedule, in all variants."""
    spaces = [
        replace(result.space, schedules=(schedule,))
        for schedule in result.space.schedules
    ]
    searches = [
        itertools.islice(Search(result.cost, space, distinct=False), each)
        for space in spaces
    ]
    return [result.cost.estimate(plan) for search in searches for _, plan in search]


def run_profile(words: list[str], prog: str) -> int:
    description = (
        "Times one layer, the output layer, the optimizer and, under torchrun, the "
        "links on this machine."
    )
    parser = Parser(prog=prog, description=description, allow_abbrev=False)
    inputs.add_model_flags(parser)
    blocks.add_flags(parser)
    options = parser.parse_args(words)
    if options.num_experts or options.multi_latent_attention:
        raise UserError(
            "--num-experts, --multi-latent-attention: only dense layers with "
            "plain attention are measured"
        )
    return blocks.run(options, inputs.model_of(options))


if __name__ == "__main__":
    sys.exit(main())
