"""From the command line to Megatron's `pretrain`: check, import, parse, validate,
install, run.

Invariant: every error of the command line is reported here, before any rank waits for
another: a line on standard error that names the flag, and exit status 2. What needs no
torch is checked before it is imported.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys

from megatron_2bw.base.argv import expand_files
from megatron_2bw.base.errors import UserError
from megatron_2bw.base.processes import end_with_parent
from megatron_2bw.run.flags import parse, quick_check
from megatron_2bw.run.flags.stop import stop
from megatron_2bw.run.start import exits, screen
from megatron_2bw.run.start.torchrun import shared_store

TRACE = "megatron_2bw.tools.timelines.trace"  # the command that joins the files of --two-bw-trace


def launch(task: str) -> None:
    """Train the task of the module named `task`, which is imported after the command
    line is checked.

    The module, as `gpt.py`, defines `model_config(args)` or `model_provider`,
    `datasets_provider` and `forward_step`.
    """
    name = task.rpartition(".")[2]
    # a shell that has started this rank may end before it
    if under_torchrun := "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    try:
        sys.argv[1:] = expand_files(sys.argv[1:])
        if (
            line := quick_check.mistake(
                sys.argv[1:], name, int(os.environ.get("WORLD_SIZE", "1"))
            )
            or shared_store()
        ):
            stop(line)
    except UserError as error:
        stop(str(error))
    screen.begin(not {"--verbose", "-h", "--help"}.isdisjoint(sys.argv))
    ours = parse.parse_early(sys.argv[1:], stop, name)
    from megatron_2bw.mcore import cpu  # it imports torch

    if ours.dry_run and ours.device != "cpu":
        cpu.judge_as_gpu()
    elif cpu.wanted(ours.device):
        # before Megatron is imported: some of its modules look for CUDA at import
        cpu.install()
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron_2bw.mcore import install

    args, runtime = parse.parse(ours, stop, quick_check.remember), None
    module = importlib.import_module(task)
    try:
        config = pretrain_cfg_container_from_args(args, module.model_config(args))
        if args.dry_run:
            sizes = (
                f"stages: {args.pipeline_model_parallel_size}, pipelines: "
                f"{args.data_parallel_size}"
            )
            device = "CPU ranks" if cpu.installed() else "GPUs"
            print(
                f"> --dry-run: the run would start; {device}: {args.world_size}, {sizes}"
            )
            return
        if "MASTER_ADDR" not in os.environ:
            stop(
                "the environment variable MASTER_ADDR is not set: start the processes with torchrun"
            )
        runtime = install(args)
        output = screen.settle(args.save or args.tensorboard_dir or args.two_bw_trace)
        if args.rank == 0:
            print(
                f"> output: {output} has all that this rank prints (--verbose shows it)"
            )
        if args.exit_signal_handler:
            atexit.register(_end_loader_workers)
            if under_torchrun:
                end_with_parent(args.exit_signal)  # this rank saves then
        try:
            # of a task without a configuration
            provider = getattr(module, "model_provider", None)
            pretrain(
                config,
                module.datasets_provider,
                ModelType.encoder_or_decoder,
                module.forward_step,
                provider,
            )
        # Megatron exits so before the last iteration, and after errors that it prints
        except SystemExit as end:
            if end.code:
                raise
            if not hasattr(args, "curr_iteration") and not args.ckpt_convert_format:
                stop(f"Megatron ended the run: {output} has its line")
        _merge_trace(args, runtime)
    except Exception as error:
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


def _merge_trace(args, runtime) -> None:
    """With --two-bw-trace: after all stages have written their files, join and draw
    them."""
    if args.two_bw_trace is None:
        return
    import torch.distributed as dist

    runtime.close_trace()
    if dist.is_initialized():
        dist.barrier()
    if args.rank == 0 and any(args.two_bw_trace.glob("stage-*")):
        # The planner's side draws: a command of its own.
        command = [sys.executable, "-m", TRACE, str(args.two_bw_trace)]
        merged = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if merged.returncode == 0:
            files = " and ".join(merged.stdout.split("\n")[:-1])
            print(f"> --two-bw-trace: wrote {files}", flush=True)
