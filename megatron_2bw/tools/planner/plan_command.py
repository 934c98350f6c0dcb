"""megatron-2bw plan: the command line of the planner.

Invariant: bad input ends with status 2 and one line that names the flag. Every printed
plan is legal and fits.
"""

import argparse
import math
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields, replace

from megatron_2bw.base import command_line
from megatron_2bw.base.argv import expand_files
from megatron_2bw.base.errors import (
    Parser,
    UserError,
    file_errors,
    list_of,
    usage_error,
)
from megatron_2bw.base.files import write_json
from megatron_2bw.run.flags.project_flags import schedule_name
from megatron_2bw.tools.planner.calibrate_command import run_calibrate
from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions import inputs
from megatron_2bw.tools.planner.descriptions.cluster import PRESETS as CLUSTERS
from megatron_2bw.tools.planner.descriptions.cluster import network
from megatron_2bw.tools.planner.find import advice
from megatron_2bw.tools.planner.find.search import Search, on_fewer
from megatron_2bw.tools.planner.find.space import (
    MEMORY,
    OTHERS,
    PLANNED,
    RECOMPUTES,
    Space,
)
from megatron_2bw.tools.planner.tell import (
    explain,
    jobs,
    json_out,
    no_plan,
    report,
)

# readers of flags' values, beside those of all commands
_TYPES = command_line.TYPES | {
    "network": network,
    "numbers": inputs.numbers,
    "schedules": list_of((*PLANNED, *OTHERS), schedule_name),
    "recomputes": list_of(RECOMPUTES),
    "memory": list_of(MEMORY),
}


def main(argv: Sequence[str] | None = None, prog: str = "megatron-2bw plan") -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    commands = {
        "plan": run_plan,
        "calibrate": run_calibrate,
    }
    name = words.pop(0) if words and words[0] in commands else "plan"
    prog += "" if name == "plan" else f" {name}"
    try:
        return commands[name](expand_files(words), prog)
    except UserError as error:
        usage_error(prog, error)
    except BrokenPipeError:  # the reader of the output has ended, as with `| head`
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        return 1


def _parser(prog: str) -> Parser:
    """The choices have the names of Space's fields."""
    parser = command_line.parser_of(prog, __file__)
    inputs.add_model_flags(parser)
    groups = command_line.table_of(__file__)["groups"]
    groups["cluster"]["--cluster"]["help"] = ", ".join(CLUSTERS)
    for title, flags in groups.items():
        command_line.add_options(parser.add_argument_group(title), flags, _TYPES)
    parser.set_defaults(schedules=PLANNED, recompute=RECOMPUTES, memory=MEMORY)
    return parser


def prepare(options: argparse.Namespace) -> tuple[Cost, Space]:
    """The cost model and the space that the flags describe."""
    cost = _cost(options)
    contexts = options.context or (1,)
    if max(contexts) > 1 and not cost.flash:
        raise UserError(
            "--context-parallel-size needs flash attention, of Transformer Engine on GPUs: leave it out"
        )
    chosen = {
        field.name: getattr(options, field.name)
        for field in fields(Space)
        if hasattr(options, field.name)
    }
    chosen["context"] = contexts
    both = (False, True)
    chosen["distributed_optimizer"] = (
        both if options.distributed_optimizer else (False,)
    )
    if cost.cluster.device.name == "cpu":
        chosen["sequence_parallel"] = False
    return cost, Space(**chosen)


def _cost(options: argparse.Namespace) -> Cost:
    model = inputs.model_of(options)
    cluster = inputs.cluster_of(options)
    device = cluster.device
    on_cpu = device.name == "cpu"
    precision = options.precision
    if not precision:
        precision = "bf16" if device.bf16 else "fp16"
        precision = "fp32" if on_cpu else precision
    flash = None if options.attention is None else options.attention == "flash"
    if flash and (precision == "fp32" or not device.flash):
        raise UserError(
            f"--attention flash: {device.name} has none in {precision}; leave it out"
        )
    margin = options.memory_margin
    if not 0 <= (margin or 0) < 1:
        raise UserError(
            f"--memory-margin {margin:g}: give a share, from 0 to less than 1"
        )
    flash = False if on_cpu else flash
    cost = Cost(
        model=model,
        cluster=cluster,
        precision=precision,
        flash=flash,
        margin=margin,
    )
    if options.adam or not cost.flash:
        torch_adam = not on_cpu and options.adam != "fused"
        return replace(cost, torch_adam=torch_adam)
    return cost


def planned(options: argparse.Namespace) -> explain.Result | None:
    """The plans of the cluster, or of a part of it that is faster. If no plan fits,
    print the reason and return None."""
    cost, space = prepare(options)
    _note(f"searching the plans of {cost.model.name} on {explain.gpus(cost)} ...")
    search = Search(cost, space)
    first = next(iter(search), None)
    if first is None and options.context is None and cost.flash:
        space = replace(space, context=None)
        search = Search(cost, space)
        first = next(iter(search), None)
        if first:
            _note(
                "nothing fits without context parallelism: planned is --context-parallel-size too"
            )
    limit = math.inf
    if first:
        limit = (1 - explain.MIN_GAIN) * first[0]
    fewer = on_fewer(cost, space, limit)
    if fewer:
        part = fewer[0].cluster
        gpus = cost.cluster.gpus
        idle = f"{gpus - part.gpus} of {gpus} GPUs stay idle"
        flags = f"--servers {part.servers} --gpus-per-server {part.gpus_per_server}"
        reason = "are faster" if first else "have a plan"
        _note(f"{idle}: {part.gpus} {reason} ({flags})")
        cost = replace(cost, cluster=part)
        search = Search(cost, space)
    elif first is None:
        print(no_plan.nothing_fits(cost, space))
        return None
    plans, ties = advice.ranked(search, options.top)
    return explain.Result(
        search=search,
        estimates=[*map(cost.estimate, plans)],
        ties=ties,
    )


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_plan(words: list[str], prog: str) -> int:
    options = _parser(prog).parse_args(words)
    result = planned(options)
    if result is None:
        return 1
    cost = result.cost
    best = result.estimates[0]
    print(explain.text(result))
    if options.verbose:
        print(f"\n{explain.details(result)}")
        flags = [*cost.model.flags(), *best.plan.flags(cost.precision)]
        print(f"\nFlags of the first plan:\n  {shlex.join(flags)}")
    _write(options, result)
    return 0


def _write(options: argparse.Namespace, result: explain.Result) -> None:
    """Write the files that the flags name."""
    cost = result.cost
    best = result.estimates[0]
    if options.script:
        jobs.write(options.script, jobs.torchrun_script(cost, best), "--script")
    if options.sbatch:
        text = jobs.sbatch_script(cost, best, cost.model.name)
        jobs.write(options.sbatch, text, "--sbatch")
    if options.report:
        report.write_report(cost, result.estimates, options.report)
    if options.json:
        with file_errors(f"--json {options.json}"):
            options.json.parent.mkdir(parents=True, exist_ok=True)
            write_json(options.json, json_out.as_json(result))
    written = (options.script, options.sbatch, options.report, options.json)
    for path in written:
        if path:
            _note(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
