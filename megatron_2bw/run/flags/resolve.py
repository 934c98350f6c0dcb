"""What a command line stands for: `auto`, shares and defaults become numbers.

`resolve` is called once, after Megatron has validated the arguments (install.py). One
value is needed before that: Adam's first decay is a flag of Megatron's (parse.py).

With 2BW the gradient of batch j + 1 changes W(j+1) and is taken one update earlier.
With --two-bw-correction it is taken at the working copy

    W'(j) = W(j) + factor (W(j) - W(j-1)) + gradient D(j),

where D(j) is the last gradient's part of the update W(j) - W(j-1). For Adam D(j) is -(1
- beta1) rate g / (sqrt(v) + eps), without the 1 / (1 - beta1^t) of the first
iterations. The first term is the error feedback of arXiv 2606.30634; the second damps
the directions of high curvature, in which the delay oscillates (docs/convergence.md).

Invariant: without torch. The arguments are read and not changed.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from megatron_2bw.mcore.correction import Correction
from megatron_2bw.mcore.options import RunOptions
from megatron_2bw.run.flags.rule import Args
from megatron_2bw.schedules import Schedule, TwoBW, schedule_of

# Optimizers whose update is a running mean of gradients, and the decay of that mean.
DECAYS = {
    "adam": "adam_beta1",
    "sgd": "sgd_momentum",
    "muon": "muon_momentum",
    "soap": "adam_beta1",
}
# Adam's first decay with `auto`: the higher one bears higher rates if all are late.
BETA1 = 0.95
BETA1_OF_MEGATRON = 0.9
# updates that `auto` looks ahead if some microbatches are late; it lowers the noise
# (docs/convergence.md)
AHEAD = 0.25
# below it `auto` adds the best factor of a gradient of pure noise, the momentum
LEAST_MOMENTUM = 0.8
# iterations of a synchronous start at most; the curvature is largest at the start, also
# of a finetuning (docs/convergence.md)
START = 500
LOW_RATE = 1e-4  # up to it plain 2BW is enough


def resolve(args: Args, iterations: int) -> RunOptions:
    """The options of a run of so many iterations."""
    schedule = schedule_for(args, iterations)
    may_end_early = args.exit_signal_handler or args.exit_duration_in_mins
    asks = schedule.late_step and may_end_early
    return RunOptions(
        schedule=schedule,
        transport=args.two_bw_exchange,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
        timed=args.timing_log_level >= 2,
        trace=args.two_bw_trace,
        wants_exit=partial(_wants_exit, args) if asks else None,
        correction=_correction(args, schedule),
        evaluates=args.eval_iters != 0,
        host=args.two_bw_optimizer == "host",
    )


def schedule_for(args: Args, iterations: int = 0) -> Schedule | None:
    """The schedule of a run of so many iterations; None for Megatron's own."""
    return schedule_of(
        args.pipeline_schedule,
        gradient_slots=args.two_bw_gradient_slots,
        extra_warmup=args.two_bw_extra_warmup,
        sync_iterations=_sync_iterations(args, iterations),
        late_microbatches=_late_microbatches(args),
        gpipe_round=args.gpipe_round,
    )


def _sync_iterations(args: Args, iterations: int) -> int:
    """--two-bw-sync-iterations as a number; a share is rounded down."""
    length = args.two_bw_sync_iterations
    if isinstance(length, str):
        percent = int(length.removesuffix("%"))
        return percent * iterations // 100
    if length is not None:
        return length
    if args.two_bw_correction == "auto" and (args.lr or 0) > LOW_RATE:
        return min(START, iterations // 5)
    return 0


def _late_microbatches(args: Args) -> int | str | None:
    """--two-bw-late-microbatches as `TwoBW` takes it."""
    if args.two_bw_late_microbatches is None and args.two_bw_correction == "auto":
        return "auto"
    return args.two_bw_late_microbatches


def replica(args: Args) -> int:
    """Samples of one microbatch on all pipelines; 0 for sizes that Megatron refuses."""
    ranks = (
        args.pipeline_model_parallel_size
        * args.tensor_model_parallel_size
        * args.context_parallel_size
    )
    return (args.micro_batch_size or 0) * (args.world_size // ranks)


def batch_sizes(args: Args) -> list[int]:
    """Samples of a batch; with --step-batch-size-schedule of each step. [0] for what
    Megatron refuses."""
    steps = (args.step_batch_size_schedule or "").replace(",", " ").split()
    if not steps:
        return [args.global_batch_size or replica(args)]
    return [int(step.split(":")[1]) for step in steps]


def adam_beta1(args: Args) -> float:
    """Adam's first decay in a run with `auto`. It is one for all batches; the largest
    decides."""
    schedule = schedule_for(args)
    if not isinstance(schedule, TwoBW):
        return BETA1_OF_MEGATRON  # a check refuses `auto`
    largest = batch_sizes(args)[-1] // max(replica(args), 1)
    late = schedule.late(args.pipeline_model_parallel_size, largest)
    return BETA1 if late == largest else BETA1_OF_MEGATRON


def _correction(args: Args, schedule: Schedule) -> Callable[[int], Correction] | None:
    """--two-bw-correction, by the microbatches of a batch; `auto` is the setting of
    docs/convergence.md."""
    if args.two_bw_correction == "none":
        return None
    if args.two_bw_correction == "extrapolate":
        constant = Correction(
            args.two_bw_correction_factor, args.two_bw_correction_gradient
        )
        return lambda microbatches: constant
    stages = args.pipeline_model_parallel_size
    momentum = getattr(args, DECAYS.get(args.optimizer, ""), LEAST_MOMENTUM)
    is_lion = args.optimizer == "muon" and args.muon_scalar_optimizer == "lion"

    def auto(microbatches: int) -> Correction:
        late = schedule.late(stages, microbatches)
        share = late / microbatches
        if momentum < LEAST_MOMENTUM:
            return Correction(momentum * share)
        factor = gradient = share + AHEAD
        if late == microbatches:
            factor = 1.5
            gradient = 2.0
        # a sign has no gradient's part
        return Correction(factor, 0.0 if is_lion else gradient)

    return auto


def _wants_exit(args: Args) -> bool:
    """Whether --exit-signal-handler or --exit-duration-in-mins ends the run, as far as
    this rank knows."""
    from megatron.training import get_signal_handler, training

    if args.exit_signal_handler and get_signal_handler()._signal_received:
        return True
    minutes = (time.time() - training._TRAIN_START_TIME) / 60
    return bool(args.exit_duration_in_mins) and minutes > args.exit_duration_in_mins
