"""Runs entry scripts under torchrun for the tests, and ends every process they started,
also after a time-out.

torchrun and two ranks take half a minute of computing to start. Where neither they nor
the start and the end of Python are what is tested, `forked` runs the same launcher in
ranks that are forked ready.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path

from megatron_2bw.base.local_ranks import own_output, run_world
from megatron_2bw.base.processes import stop_tree
from megatron_2bw.run.start.torchrun import ROOT, environment
from megatron_2bw.run.start.torchrun import start as start_command
from megatron_2bw.run.start.torchrun import torchrun as ranks_of


def torchrun(
    ranks: int,
    script: str,
    flags: list[str],
    cwd: Path = ROOT,
    timeout: float = 150,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """`script` with `flags` on `ranks` processes. AssertionError with the output's end
    if it outlasts `timeout` s."""
    process = start(ranks, script, flags, cwd, **environment)
    return end(process, timeout)


def forked(
    ranks: int,
    flags: list[str],
    documents: int = 2000,
    script: Path | None = None,
    **environment: str,
) -> str:
    """What the ranks of pretrain_gpt_2bw.py print, one after the other. WorldError with
    the ends of it if one fails.

    documents: of the mock data, of which torchrun's ranks have 100,000. script: another
    entry script.
    """
    return "\n".join(
        run_world(ranks, _launch, list(map(str, flags)), documents, script, environment)
    )


def _launch(
    rank: int,
    flags: list[str],
    documents: int,
    script: Path | None,
    environment: dict[str, str],
) -> str:
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    from megatron_2bw.run.start.launch import launch

    MockGPTLowLevelDataset.size = documents
    os.environ.update(environment)
    sys.argv = ["pretrain_gpt_2bw.py", *flags]
    try:
        runpy.run_path(str(script), run_name="__main__") if script else launch(
            "megatron_2bw.run.tasks.gpt"
        )
    except SystemExit as end:
        if end.code:
            os._exit(end.code)  # what there is to say has been printed
    return own_output()


def start(
    ranks: int, script: str, flags: list[str], cwd: Path = ROOT, **variables: str
) -> subprocess.Popen[str]:
    """The processes of `torchrun`, started; `end` must follow."""
    command = [*ranks_of(ranks, script=script), *map(str, flags)]
    return start_command(
        command, cwd=cwd, stderr=subprocess.PIPE, env=environment() | variables
    )


def program(*words: object, **options) -> subprocess.Popen[str]:
    """A program of Python in this clone, started; `end` must follow."""
    command = [sys.executable, *map(str, words)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def output_of(run: subprocess.CompletedProcess[str]) -> str:
    """Standard output of a run that must have succeeded."""
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-4000:]
    return run.stdout


def end(
    process: subprocess.Popen[str], timeout: float = 150
) -> subprocess.CompletedProcess[str]:
    """Wait for what `start` or `program` has started."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        stop_tree(process)
        try:
            out, err = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            out, err = "", "a process that has lost its parent keeps the pipes open"
        raise AssertionError(
            f"{process.args} ran for more than {timeout} s\n{out[-2000:]}\n{err[-2000:]}"
        ) from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
