"""A plan as a script that starts it: run.sh for torchrun, job.sbatch for Slurm. Pure
Python.

Invariant: a script holds the plan's flags, one per line. The caller's own flags come
last, so they take precedence.
"""

import os
import re
import shlex
from pathlib import Path

from megatron_2bw.base.argv import groups
from megatron_2bw.base.errors import UserError, file_errors, one_line
from megatron_2bw.base.files import write_whole
from megatron_2bw.tools.planner.cost.simulated import Cost, Estimate
from megatron_2bw.tools.planner.descriptions.model import Model
from megatron_2bw.tools.planner.tell import training

SLURM = Path(__file__).parents[2] / "slurm"  # its scripts train a model by name


def torchrun_script(cost: Cost, estimate: Estimate) -> str:
    """run.sh, which trains the model. The user starts it on each server of the
    cluster."""
    entry = f"pretrain_{cost.model.kind}_2bw"
    cluster = cost.cluster
    usage = "./run.sh [FLAGS]"
    first = "NODE_RANK=${NODE_RANK:-0}\nMASTER_ADDR=${MASTER_ADDR:-localhost}"
    if cluster.servers > 1:  # with the defaults each server would wait for itself
        last = cluster.servers - 1
        usage = (
            "MASTER_ADDR=HOST NODE_RANK=N ./run.sh [FLAGS]   on each server; HOST is "
            f"the first, N is 0 to {last}"
        )
        first = f"NODE_RANK=${{NODE_RANK:?the number of this server, 0 to {last}}}\n"
        first += "MASTER_ADDR=${MASTER_ADDR:?the host name of the first server}"
    return f"""\
#!/usr/bin/env bash
{_about(cost, estimate)}
#
#   {usage}
#
# CHECKPOINTS=folder: save there, and continue from there.
# MEGATRON_2BW=clone: train with a clone's code instead of the installed package.
{_NOTES}
set -euo pipefail

NNODES=${{NNODES:-{cluster.servers}}}
{first}
MASTER_PORT=${{MASTER_PORT:-29500}}
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-1}}
entry=(-m {entry})
[[ -z ${{MEGATRON_2BW:-}} ]] || entry=("$MEGATRON_2BW/{entry}.py")

{_arrays(cost, estimate, f'{{ echo "error: {_WRONG_DATA}" >&2; exit 2; }}')}
checkpoints=()
[[ -z ${{CHECKPOINTS:-}} ]] || checkpoints=(
    --save "$CHECKPOINTS"
    --load "$CHECKPOINTS"
    --save-interval {training.save_interval(estimate.seconds)}
)

exec torchrun \\
    --nnodes "$NNODES" \\
    --node-rank "$NODE_RANK" \\
    --nproc-per-node {cluster.gpus_per_server} \\
    --master-addr "$MASTER_ADDR" \\
    --master-port "$MASTER_PORT" \\
    "${{entry[@]}}" \\
    "${{model[@]}}" "${{plan[@]}}" "${{training[@]}}" "${{data[@]}}" "${{checkpoints[@]}}" "$@"
"""


def sbatch_script(cost: Cost, estimate: Estimate, job_name: str) -> str:
    """job.sbatch: the same run as a Slurm job. Each start continues from the last
    checkpoint."""
    cluster = cost.cluster
    name = re.sub(r"[^\w.-]+", "-", job_name).strip("-") or "megatron-2bw"
    gpus = (
        [f"--gpus-per-node={cluster.gpus_per_server}"]
        if cluster.device.name != "cpu"
        else []
    )
    shipped = (SLURM / f"pretrain_{cost.model.kind}_2bw.sbatch").read_text()
    options = [f"--job-name={name}", f"--nodes={cluster.servers}", *gpus]
    options += re.findall("^#SBATCH (?!--job-name|--nodes)(.+)", shipped, re.MULTILINE)
    head = "\n".join(f"#SBATCH {option}" for option in options)
    return f"""\
#!/usr/bin/env bash
{head}

{_about(cost, estimate)}
#
#   sbatch job.sbatch [FLAGS]
#
# It saves and requeues itself before its time limit and on preemption, and resumes from the folder
# CHECKPOINTS. megatron_2bw/tools/slurm/job.sh lists the variables, such as PREAMBLE (modules) and SRUN_ARGS
# (containers); docs/slurm.md describes the rest. Account and partition: sbatch's options, or Slurm's own
# variables SBATCH_ACCOUNT and SBATCH_PARTITION.
{_NOTES}
set -euo pipefail

CHECKPOINTS=${{CHECKPOINTS:-$PWD/checkpoints/{name}}}
SAVE_INTERVAL=${{SAVE_INTERVAL:-{training.save_interval(estimate.seconds)}}}
PROCESSES_PER_NODE={cluster.gpus_per_server}
{shipped[shipped.index("if [[ -z") : shipped.rindex("train ")].strip()}

{_arrays(cost, estimate, f'fail "{_WRONG_DATA}"')}

run_job pretrain_{cost.model.kind}_2bw.py "${{model[@]}}" "${{plan[@]}}" "${{training[@]}}" "${{data[@]}}" "$@"
"""


_NOTES = """
# FLAGS are Megatron's; they come last and take precedence. DATA_ARGS replaces the mock data, for example
#   DATA_ARGS="--data-path my_text --tokenizer-type HuggingFaceTokenizer --tokenizer-model my_tokenizer"
# Without Apex add --no-gradient-accumulation-fusion. Without Transformer Engine and Apex add that and
# --transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion. The local
# layers keep the attention scores; plan with --attention core.
""".strip()


def _about(cost: Cost, estimate: Estimate) -> str:
    plan = estimate.plan
    cluster = cost.cluster
    name = one_line(cost.model.name)
    where = one_line(cluster.name)
    context = f"{plan.context} context ranks x " if plan.context > 1 else ""
    sizes = f"{plan.tensor} tensor ranks x {context}{plan.depth} stages x {plan.width} pipelines"
    batch = (
        f"{plan.microbatches} microbatches of {plan.microbatch}, global batch "
        f"{plan.global_batch}"
    )
    lines = [
        (
            f"{name} on {cluster.servers} x {where} ({cluster.gpus} GPUs), planned by "
            "megatron-2bw plan:"
        )
    ]
    lines.append(f"{plan.schedule}, {sizes}, {batch}.")
    return "\n".join(f"# {line}" for line in lines)


_WRONG_DATA = "DATA_ARGS cannot be split into words: a quote does not end"


def _arrays(cost: Cost, estimate: Estimate, refuse: str) -> str:
    """The flags as bash arrays, by subject. The script runs `refuse` if DATA_ARGS
    cannot be split."""
    arrays = {
        "model": cost.model.flags(),
        "plan": estimate.plan.flags(cost.precision),
        "training": training.flags(estimate.seconds),
        "data": mock_data(cost.model),
    }
    lines = []
    for name, words in arrays.items():
        lines += [
            f"{name}=(",
            *(f"    {shlex.join(flag)}" for flag in groups(words)),
            ")",
        ]
    # xargs splits into words as a shell does, and expands nothing. A NUL ends each
    # word.
    lines.append("if [[ ${DATA_ARGS:-} == *[![:space:]]* ]]; then")
    lines.append(
        "    mapfile -d '' -t data < <(xargs printf '%s\\0' <<<\"$DATA_ARGS\" 2>/dev/null)"
    )
    return "\n".join([*lines, f"    wait $! || {refuse}", "fi"])


def mock_data(model: Model) -> list[str]:
    """Flags of random tokens from the model's vocabulary."""
    return [
        "--mock-data",
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        str(model.vocab),
    ]


def write(path: Path, text: str, flag: str = "--script") -> None:
    """Write an executable file in one step. UserError names `flag`, also if the file
    exists."""
    if os.path.lexists(path):
        raise UserError(f"{flag} {path} exists; remove it or give another name")
    with file_errors(f"{flag} {path}"):
        write_whole(path, text)
        path.chmod(0o755)
