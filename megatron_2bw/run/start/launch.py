"""From the command line to Megatron's `pretrain`: check, import, parse, validate,
install, run.

Invariant: every error of the command line is reported here, before any rank waits for
another: a line on standard error that names the flag, and exit status 2. What needs no
torch is checked before it is imported.
"""

import atexit
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from argparse import Namespace
from types import ModuleType
from typing import Any

from megatron_2bw.base.argv import expand_files
from megatron_2bw.base.errors import UserError
from megatron_2bw.base.processes import end_with_parent
from megatron_2bw.run.flags import parse, quick_check
from megatron_2bw.run.flags.stop import stop
from megatron_2bw.run.start import exits, screen
from megatron_2bw.run.start.torchrun import shared_store

TRACE = "megatron_2bw.tools.timelines.trace"  # the command that joins the files of --pipeline-trace


def launch(task: str) -> None:
    """Train the task of the module named `task`, which is imported after the command
    line is checked.

    The module, as `gpt.py`, defines `model_config(args)` or `model_provider`,
    `datasets_provider` and `forward_step`.
    """
    name = task.rpartition(".")[2]
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if under_torchrun:
        end_with_parent()  # a shell that has started this rank may end before it
    _check_quickly(name)
    screen.begin(not {"--verbose", "-h", "--help"}.isdisjoint(sys.argv))
    early = parse.parse_early(sys.argv[1:], stop, name)
    from megatron_2bw.mcore import cpu  # it imports torch

    if early.dry_run and early.device != "cpu":
        cpu.judge_as_gpu()
    elif cpu.wanted(early.device):
        # before Megatron is imported: some of its modules look for CUDA at import
        cpu.install()
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron_2bw.mcore import install

    args = parse.parse(early, stop, quick_check.remember)
    module = importlib.import_module(task)
    runtime = None
    try:
        config = pretrain_cfg_container_from_args(args, module.model_config(args))
        if args.dry_run:
            device = "CPU ranks" if cpu.installed() else "GPUs"
            print(
                f"> --dry-run: the run would start; {device}: {args.world_size}, "
                f"stages: {args.pipeline_model_parallel_size}, "
                f"pipelines: {args.data_parallel_size}"
            )
            return
        if "MASTER_ADDR" not in os.environ:
            stop(
                "the environment variable MASTER_ADDR is not set: start the processes with torchrun"
            )
        runtime = install(args)
        output = screen.move_to(
            args.save or args.tensorboard_dir or args.pipeline_trace
        )
        if args.rank == 0:
            print(
                f"> output: {output} has all that this rank prints (--verbose shows it)"
            )
        if args.exit_signal_handler:
            atexit.register(_end_loader_workers)
            if under_torchrun:
                end_with_parent(args.exit_signal)  # this rank saves then
        _pretrain(args, config, module, output)
        if args.pipeline_trace is not None:
            _merge_trace(args, runtime)
    except Exception as error:
        _end(error, args, runtime)


def _check_quickly(name: str) -> None:
    """Stop at a mistake that needs no torch to be seen; expands the files of argv."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        sys.argv[1:] = expand_files(sys.argv[1:])
        line = quick_check.mistake(sys.argv[1:], name, ranks) or shared_store()
    except UserError as error:
        line = str(error)
    if line:
        stop(line)


def _pretrain(args: Namespace, config: Any, module: ModuleType, output: str) -> None:
    from megatron.core.enums import ModelType
    from megatron.training import pretrain

    try:
        pretrain(
            config,
            module.datasets_provider,
            ModelType.encoder_or_decoder,
            module.forward_step,
            # of a task without a configuration
            getattr(module, "model_provider", None),
        )
    # Megatron exits so before the last iteration, and after errors that it prints
    except SystemExit as end:
        if end.code:
            raise
        if not hasattr(args, "curr_iteration") and not args.ckpt_convert_format:
            stop(f"Megatron ended the run: {output} has its line")


def _end(error: Exception, args: Namespace, runtime: Any) -> None:
    """End this rank after an exception."""
    # training has begun
    if hasattr(args, "curr_iteration") or exits.is_peer_failure(error):
        log = getattr(runtime, "log", None)
        # else a line needs the other ranks
        alone = args.timing_log_level == 0 and not args.log_energy
        exits.leave(error, log.flush if log is not None and alone else None)
    screen.record(error)
    # errors that Megatron finds while it builds the model and the data
    stop(parse.explain(error))


def _end_loader_workers() -> None:
    """Kill the data loader's processes before Python joins them: it sends SIGTERM,
    which they ignore, since they have inherited Megatron's handler. The run would never
    exit."""
    # torch would raise an error about a killed worker
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def _merge_trace(args: Namespace, runtime: Any) -> None:
    """After all stages have written their files of --pipeline-trace, join and draw
    them."""
    import torch.distributed as dist

    runtime.close_trace()
    if dist.is_initialized():
        dist.barrier()
    if args.rank == 0 and any(args.pipeline_trace.glob("stage-*")):
        # The planner's side draws: a command of its own.
        command = [sys.executable, "-m", TRACE, str(args.pipeline_trace)]
        merged = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if merged.returncode == 0:
            files = " and ".join(merged.stdout.splitlines())
            print(f"> --pipeline-trace: wrote {files}", flush=True)
