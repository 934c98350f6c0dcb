"""Megatron's flags of a Slurm job, as a shell quotes them: of a model by name, or of a
plan file of the planner.

Invariant: the numbers are megatron_2bw.tools.planner's; what does not fit the allocation ends
with one line and status 2.

    python megatron_2bw/tools/slurm/job_flags.py --kind gpt --model gpt-2.2b --servers 1
    --processes 8 --precision bf16
"""

import json
import shlex
import sys
from argparse import Namespace
from pathlib import Path

from megatron_2bw.base.argv import merged
from megatron_2bw.base.command_line import parser_of
from megatron_2bw.base.errors import UserError
from megatron_2bw.run.start.plan_file import FirstPlan, first_plan
from megatron_2bw.tools.planner.descriptions.model import PRESETS, Model
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.tell import training
from megatron_2bw.tools.planner.tell.jobs import mock_data


def flags_of_job(options: Namespace) -> list[str]:
    """The flags of the model, the plan, a first training and the data (by default mock
    data), and with --save of the interval of the checkpoints. UserError names the wrong
    variable."""
    if options.plan:
        first = _planned(options)
        flags = first.flags
        mock = first.mock_data
        interval = first.save_interval
    else:
        chosen = _named(options.model, options.kind)
        sizes = default_plan(chosen, options.servers * options.processes)
        # 2bw with its defaults
        on_2bw = merged(sizes.flags(options.precision), ["--pipeline-schedule", "2bw"])
        flags = chosen.flags() + on_2bw + training.flags()
        mock = mock_data(chosen)
        interval = ["--save-interval", str(training.save_interval(0))]
    if options.save:
        flags = flags + interval
    try:
        return flags + (shlex.split(options.data) or mock)
    except ValueError as error:
        data = " ".join(options.data.split())
        raise UserError(f"DATA_ARGS={data}: {error}") from None


def _planned(options: Namespace) -> FirstPlan:
    """The first plan of a file. UserError if it is not one for this job."""
    where = f"PLAN={options.plan}"
    try:
        content = json.loads(Path(options.plan).read_text())
        first = first_plan(content)
        planned = content["precision"]
        cluster = content["cluster"]
        nodes = cluster["servers"]
        gpus = cluster["gpus_per_server"]
    except (OSError, ValueError, TypeError, LookupError) as error:
        remedy = "write it with megatron-2bw plan ... --json"
        raise UserError(
            f"{where} holds no plan ({type(error).__name__}: {error}); {remedy}"
        ) from None
    if first.kind != options.kind:
        raise UserError(
            f"{where} is for {first.model}, a {first.kind.upper()}: submit "
            f"pretrain_{first.kind}_2bw.sbatch"
        )
    other_model = options.model not in ("", first.model)
    if other_model or options.precision not in ("", planned):
        raise UserError(
            f"{where} is for {first.model} in {planned}: leave out MODEL and PRECISION"
        )
    if (nodes, gpus) != (options.servers, options.processes):
        raise UserError(
            f"{where} is for {nodes} nodes with {gpus} GPUs each, the job has "
            f"{options.servers} with {options.processes}: give sbatch --nodes={nodes} "
            f"--gpus-per-node={gpus}"
        )
    return first


def _named(name: str, kind: str) -> Model:
    """UserError for a name that is none of this kind."""
    if name in PRESETS and PRESETS[name].kind == kind:
        return PRESETS[name]
    names = ", ".join(each for each in PRESETS if PRESETS[each].kind == kind)
    raise UserError(
        f"MODEL={name}: give MODEL or PLAN=plan.json; MODEL is one of {names}"
    )


def default_plan(model: Model, ranks: int) -> Plan:
    """2BW on as many stages as divide the ranks and the layers, with the fewest
    microbatches that fill them.

    If the caller changes --pipeline-model-parallel-size, the same global batch still
    fills the stages.
    """
    depth = max(
        d for d in range(1, ranks + 1) if ranks % d == 0 and model.layers % d == 0
    )
    return Plan(
        tensor=1,
        depth=depth,
        width=ranks // depth,
        microbatch=1,
        microbatches=depth,
        schedule="pipedream-flush",
    )


def main() -> int:
    """For job.sh: an error line comes on stdout."""
    parser = parser_of("job_flags.py", __file__)
    status = 0
    try:
        text = shlex.join(flags_of_job(parser.parse_args()))
    except UserError as error:
        text, status = str(error), 2
    print(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
