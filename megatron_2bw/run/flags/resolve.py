"""What a command line stands for: `auto`, shares and defaults become numbers.

`resolve` is called once, after Megatron has validated the arguments (install.py).

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
from megatron_2bw.mcore.rebinding import constant
from megatron_2bw.run.flags.rule import Args
from megatron_2bw.schedules import NONE_LATE, Schedule, Shape, TwoBW, schedule_of
from megatron_2bw.schedules.two_bw import LEAD

# Optimizers whose update is a running mean of gradients, and the decay of that mean.
DECAYS = {
    "adam": "adam_beta1",
    "sgd": "sgd_momentum",
    "muon": "muon_momentum",
    "soap": "adam_beta1",
}
# updates that `auto` looks ahead if some microbatches are late; it lowers the noise
# (docs/convergence.md)
AHEAD = 0.25
# the optimizers for which `auto` predicts weights (docs/convergence.md)
PREDICTED = ("adam", "muon")
# updates beyond the predicted weights, with `predict` (docs/convergence.md)
PREDICTED_AHEAD = 0.5
# below it `auto` adds the best factor of a gradient of pure noise, the momentum
LEAST_MOMENTUM = 0.8
# iterations of a synchronous start at most; the curvature is largest at the start, also
# of a finetuning (docs/convergence.md)
START = 500
LOW_RATE = 1e-4  # up to it no start is needed


def resolve(args: Args, iterations: int) -> RunOptions:
    """The options of a run of so many iterations."""
    schedule = schedule_for(args, iterations)
    may_end_early = args.exit_signal_handler or args.exit_duration_in_mins
    asks = schedule.late_step and may_end_early
    return RunOptions(
        schedule=schedule,
        transport=args.pipeline_exchange,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
        timed=args.timing_log_level >= 2,
        trace=args.pipeline_trace,
        wants_exit=partial(_wants_exit, args) if asks else None,
        correction=_correction(args, schedule),
        evaluates=args.eval_iters != 0,
    )


def schedule_for(args: Args, iterations: int = 0) -> Schedule | None:
    """The schedule of a run of so many iterations; None for Megatron's own."""
    return schedule_of(
        args.pipeline_schedule,
        late=args.two_bw_late,
        memory=args.two_bw_memory,
        extra_warmup=args.two_bw_extra_warmup,
        sync_iterations=_sync_iterations(args, iterations),
        predicts=prediction(args) is not None,
        lead=_prediction_lead(args),
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
    starts = args.two_bw_correction == "auto" or prediction(args) is not None
    if starts and (args.lr or 0) > LOW_RATE:
        return min(START, iterations // 5)
    return 0


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


def _correction(args: Args, schedule: Schedule) -> Callable[[int], Correction] | None:
    """--two-bw-correction, by the microbatches of a batch; `auto` is the setting of
    docs/convergence.md."""
    if args.two_bw_correction == "none" or args.two_bw_late in NONE_LATE:
        return None
    if predicted := prediction(args):
        return constant(predicted)
    if args.two_bw_correction != "auto":
        return constant(correction_of(args.two_bw_correction))
    momentum = getattr(args, DECAYS.get(args.optimizer, ""), LEAST_MOMENTUM)
    is_lion = args.optimizer == "muon" and args.muon_scalar_optimizer == "lion"

    def auto(microbatches: int) -> Correction:
        share = schedule.late_of(microbatches) / microbatches
        if momentum < LEAST_MOMENTUM:
            return Correction(momentum * share)
        # a sign has no gradient's part
        return Correction(share + AHEAD, 0.0 if is_lion else share + AHEAD)

    return auto


def prediction(args: Args) -> Correction | None:
    """The correction of `predict`, and of `auto` where it predicts; else None."""
    text = args.two_bw_correction
    if text.startswith("predict"):
        return correction_of(text)
    if text == "auto" and obstacle(args, batch_sizes(args)) is None:
        return correction_of("predict")
    return None


def _prediction_lead(args: Args) -> int:
    """`TwoBW.lead`: with several pipelines the prediction waits for sums over them."""
    ranks = args.pipeline_model_parallel_size * args.tensor_model_parallel_size
    return LEAD if args.world_size > ranks else 0


def obstacle(args: Args, sizes: list[int]) -> str | None:
    """Why the weights of late microbatches cannot be predicted in batches of these
    sizes, or why `auto` does not; None if they are."""
    if args.two_bw_late != "all":
        return "it needs --two-bw-late all: add it"
    lead = 0
    if args.two_bw_correction == "auto":
        if args.optimizer not in PREDICTED:
            return f"--optimizer {args.optimizer} was not measured: use predict"
        lead = _prediction_lead(args)
    if args.optimizer == "soap":
        return "--optimizer soap has no prediction: use auto"
    if args.two_bw_memory == "host":
        return "the moments of --two-bw-memory host are not on the device: use auto"
    stages = args.pipeline_model_parallel_size
    schedule = TwoBW(extra_warmup=args.two_bw_extra_warmup)
    ahead = schedule.ahead(Shape(stages, 1), 0) + lead
    for size in sizes:
        count = size // (replica(args) or 1)
        if count <= ahead:
            return (
                f"with {ahead} microbatches or fewer the first stage has no gradient "
                "before the next batch begins: use more, or auto"
            )
    return None


def correction_of(text: str) -> Correction:
    """The correction of FACTOR[,GRADIENT], 0 to 2 and 0 to 10, or of predict[,AHEAD], 0
    to 2. ValueError for others."""
    factor, _, gradient = text.partition(",")
    if factor == "predict":
        ahead = float(gradient or PREDICTED_AHEAD)
        if 0 <= ahead <= 2:
            return Correction(ahead=ahead)
        raise ValueError(text)
    correction = Correction(float(factor), float(gradient or 0))
    if not (0 <= correction.factor <= 2 and 0 <= correction.gradient <= 10):
        raise ValueError(text)
    return correction


def _wants_exit(args: Args) -> bool:
    """Whether --exit-signal-handler or --exit-duration-in-mins ends the run, as far as
    this rank knows."""
    from megatron.training import get_signal_handler, training

    if args.exit_signal_handler and get_signal_handler()._signal_received:
        return True
    minutes = (time.time() - training._TRAIN_START_TIME) / 60
    return bool(args.exit_duration_in_mins) and minutes > args.exit_duration_in_mins
