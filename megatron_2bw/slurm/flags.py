"""Megatron's flags of a Slurm job, one word per line: of a model by name, or of a plan file of the planner.

Invariant: the numbers are megatron_2bw.planner's; what does not fit the allocation ends with one line and status 2.

    python megatron_2bw/slurm/flags.py --kind gpt --model gpt-2.2b --servers 1 --processes 8 --precision bf16
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # job.sh may name another clone than the installed one

from megatron_2bw.errors import Parser, UserError, usage_error
from megatron_2bw.models.model import PRESETS, Model
from megatron_2bw.models.plan import Plan
from megatron_2bw.models.reading import described
from megatron_2bw.planner.tell import training
from megatron_2bw.planner.tell.jobs import mock_data

PRECISIONS = ("bf16", "fp16", "fp32")


def words(
    kind: str, model: str, plan: str, servers: int, processes: int, precision: str, data: str = "", save: bool = False
) -> list[str]:
    """The flags of the model, the plan, a first training and the data (by default mock data).

    save: also the plan's --save-interval. UserError names the wrong variable.
    """
    if precision and precision not in PRECISIONS:
        raise UserError(f"PRECISION={precision}: not one of {', '.join(PRECISIONS)}")
    entry = _read(Path(plan)) if plan else None
    found = entry["model"] if entry else _named(model, kind)
    if found.kind != kind:
        raise UserError(f"{found.name} is a {found.kind.upper()}: submit pretrain_{found.kind}_2bw.sbatch")
    run, interval = training.flags("2bw"), training.save_interval(0)
    if entry is None:
        sizes = default_plan(found, servers * processes).flags(precision)
    elif model and model != found.name:
        raise UserError(f"MODEL={model}: PLAN={plan} is for {found.name}; give one of them")
    elif precision and precision != entry["precision"]:
        raise UserError(f"PRECISION={precision}: PLAN={plan} is for {entry['precision']}; plan with --precision")
    else:
        best, cluster = entry["plans"][0], entry["cluster"]
        if (cluster["servers"], cluster["gpus_per_server"]) != (servers, processes):
            wanted = "{servers} nodes with {gpus_per_server} GPUs each".format(**cluster)
            flags = "--nodes={servers} --gpus-per-node={gpus_per_server}".format(**cluster)
            job = f"the job has {servers} with {processes}: give sbatch {flags}, or plan for these"
            raise UserError(f"PLAN={plan} is for {wanted}, {job}")
        sizes, run = best["flags"], best.get("training", training.flags(""))  # older files have none
        interval = best.get("save_interval", interval)
    try:
        own = shlex.split(data)
    except ValueError as error:
        raise UserError(f"DATA_ARGS={' '.join(data.split())}: {error}") from None
    saves = ["--save-interval", str(interval)] if save else []
    return [*found.flags(), *sizes, *run, *saves, *(own or mock_data(found))]


def _named(name: str, kind: str) -> Model:
    found = PRESETS.get(name)
    if found is None:
        names = ", ".join(model.name for model in PRESETS.values() if model.kind == kind)
        what = f"MODEL={name}: not one of" if name else "give MODEL or PLAN=plan.json; MODEL is one of"
        raise UserError(f"{what} {names}")
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
        if content["plans"][0]["flags"] and content["cluster"] and content["precision"]:
            return content | {"model": described(Model, content["model"], f"PLAN={path}: model")}
    except OSError as error:
        raise UserError(f"PLAN={path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, LookupError):
        pass
    raise UserError(f"PLAN={path} holds no plan; write it with megatron-2bw-plan ... --json {path}")


def default_plan(model: Model, ranks: int) -> Plan:
    """2BW on as many stages as divide the ranks and the layers, with the fewest microbatches that fill them.

    If the caller changes --pipeline-model-parallel-size, the same global batch still fills the stages.
    """
    depth = max(d for d in range(1, ranks + 1) if ranks % d == 0 and model.layers % d == 0)
    return Plan(tensor=1, depth=depth, width=ranks // depth, microbatch=1, microbatches=depth, extrapolate=True)


def main() -> int:
    parser = Parser(prog="flags.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    option = parser.add_argument
    option("--kind", required=True, choices=("gpt", "bert"))
    option("--model", default="", help="of the planner's presets")
    option("--plan", default="", metavar="FILE.json", help="what megatron-2bw-plan --json wrote")
    option("--servers", type=int, required=True)
    option("--processes", type=int, required=True, help="a server")
    option("--data", default="", metavar="FLAGS", help="instead of the mock data")
    option("--precision", default="", metavar="|".join(PRECISIONS))
    option("--save", action="store_true", help="the job saves checkpoints: also --save-interval")
    quoted = "for job.sh: the words as a shell quotes them; an error line on stdout"
    option("--quoted", action="store_true", help=quoted)
    options = vars(parser.parse_args())
    quoted = options.pop("quoted")
    try:
        found = words(**options)
    except UserError as error:
        if not quoted:
            usage_error("flags.py", error)
        _print(str(error))
        return 2
    _print(shlex.join(found) if quoted else "\n".join(found))
    return 0


def _print(text: str) -> None:
    """Print it, although a path may hold bytes that are not UTF-8."""
    sys.stdout.buffer.write(os.fsencode(text + "\n"))


if __name__ == "__main__":
    sys.exit(main())
