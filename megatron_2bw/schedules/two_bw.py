"""PipeDream-2BW: no flush, two weight versions, gradients delayed by one update (paper,
section 3.1)."""

from dataclasses import dataclass, replace

from megatron_2bw.schedules.base import (
    Action,
    B,
    Schedule,
    Shape,
    reduce,
    step,
    with_flush,
    without_flush,
)


@dataclass(frozen=True)
class TwoBW(Schedule):
    """Every microbatch of batch j runs on W(max(j-1, 0)), forward and backward, on
    every stage; or only the first do.

    The step of batch j stands in the list of iteration j + 1, at the last possible
    place: before this stage's first forward that reads W(j + 1), and before the last
    backward of batch j + 1, which starts the next reduction. Stage 0 finishes batch j
    last. When any stage reaches the step, stage 0 finished that batch at least m - 1 -
    w >= 0 pairs of F and B and one forward earlier, with w its forwards ahead (d - 1
    without extra warm-up). So the step's global quantities arrive before a stage needs
    them.

    gradient_slots  2: batch j + 1 accumulates while batch j is reduced and clipped. 1:
                    the first backward of batch j + 1 needs the memory of batch j's
                    gradients, so it waits for the step. "shard": it waits for the
                    reduction, after which one shard of them is kept.
    extra_warmup    k for each boundary between stages, first to last (one number stands
                    for all): the stages before it run k more forwards ahead. A
                    microbatch crosses a boundary twice, F down and B up, between a
                    stage's F and its B. With k = 0 both messages add to every
                    microbatch's time; with k each is hidden up to k / 2 of that time.
                    For slow links; it costs the activations of k microbatches.
    sync_iterations the first n batches run on W(j), with a flush after each but the
                    last of them, whose backwards already overlap the forwards of batch
                    n on the same W(n-1). So 0 and 1 are the same.
    late_microbatches  the first of batch j, which run on W(j-1); the others run on
                       W(j). None: all, as in the paper. At least stage 0's forwards
                       ahead; each one more gives the step the time of an F and a B.
                       "auto": by the size of the batch, see `late_of_auto`.
    """

    name = "2bw"
    summary = "no flush, two weight versions, gradient delay 1"
    flushes = False
    late_step = True

    gradient_slots: int | str = 2
    extra_warmup: tuple[int, ...] = ()
    sync_iterations: int = 0
    late_microbatches: int | str | None = None

    def ahead(self, shape: Shape, stage: int) -> int:
        return self._ahead(shape.stages, stage)

    def _ahead(self, stages: int, stage: int) -> int:
        boundaries = stages - 1
        extra = self.extra_warmup
        if len(extra) == 1:
            extra = extra * boundaries
        return boundaries - stage + sum(extra[stage:boundaries])

    def version(
        self,
        shape: Shape,
        stage: int,
        microbatch: int,
    ) -> int:
        batch = shape.batch(microbatch)
        late = self.late(shape.stages, shape.microbatches)
        is_fresh = late is not None and microbatch % shape.microbatches >= late
        if is_fresh or batch < max(self.sync_iterations, 1):
            return batch
        return batch - 1

    def reads_late(self, version: int) -> bool:
        # W(v) is read by batch v + 1, one update late; and by batch v itself if all of
        # that runs without delay.
        return version >= max(self.sync_iterations, 1)

    def actions(
        self,
        shape: Shape,
        stage: int,
        iteration: int,
    ) -> list[Action]:
        # the last iteration that fills the pipeline
        filled = max(shape.first, self.sync_iterations - 1)
        if iteration < filled:
            return with_flush(self, shape, stage, iteration)
        order = without_flush(self, replace(shape, first=filled), stage, iteration)
        if iteration > filled:
            order.insert(self._latest(order, iteration), step(iteration - 1))
        order.append(reduce(iteration))
        if iteration == shape.end - 1:
            order.append(step(iteration))
        return order

    def _latest(self, order: list[Action], iteration: int) -> int:
        """The index in `order` for the step of batch `iteration - 1`, which writes
        W(iteration)."""
        backwards = []
        readers = []
        for place, action in enumerate(order):
            if action.kind == B:
                backwards.append(place)
            elif action.version == iteration:
                readers.append(place)
        latest = backwards[-1]
        if self.gradient_slots == 1:
            latest = backwards[0]
        return min([latest, *readers])

    def min_microbatches(self, stages: int) -> int:
        # With fewer, a forward would need W(j) before the last backward of batch j-1
        # has started its step.
        return self._ahead(stages, 0) + 1

    def late(self, stages: int, microbatches: int) -> int | None:
        """How many microbatches of a batch of that size are late; None: all."""
        if isinstance(self.late_microbatches, str):  # "auto"
            return self.late_of_auto(stages, microbatches)
        return self.late_microbatches

    def late_of_auto(self, stages: int, microbatches: int) -> int | None:
        """What --two-bw-correction auto chooses: a quarter of a batch, one or two a
        stage; all, if that is more than half."""
        least = self.min_microbatches(stages)
        late = max(least, min(2 * least, microbatches // 4))
        return late if late <= microbatches // 2 else None

    def max_versions(self, shape: Shape, stage: int) -> int:
        return 2

    def max_in_flight(self, shape: Shape, stage: int) -> int:
        return self.ahead(shape, stage) + 1
