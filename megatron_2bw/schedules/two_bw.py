"""PipeDream-2BW: two weight versions, and gradients that are late by one update at most
(paper, section 3.1). With fewer late microbatches it lies between 1F1B and the paper.
"""

from dataclasses import dataclass

from megatron_2bw.schedules.base import (
    PREDICT,
    Action,
    B,
    Schedule,
    Shape,
    reduce,
    step,
)

NONE_LATE = (0, "0%")  # values of `late`
LEAD = 1  # the value of `lead` where a prediction waits for sums over replicas


@dataclass(frozen=True)
class TwoBW(Schedule):
    """The first K microbatches of batch j are late: they run on W(j - 1), forward and
    backward, on every stage. The others run on W(j).

    Late microbatches of batch j run before the step of batch j - 1 is complete, up to
    as many as a stage is ahead of its backwards. So with m microbatches on d even
    stages a batch takes m + max(d - 1 - K, 0) times an F and a B: K = 0 has the order
    of 1F1B with a flush, K = d - 1 no bubble, K = m is the paper's 2BW. With K < m or
    K >= d - 1 no schedule with K late microbatches and one chunk a stage is faster
    (docs/schedules.md).

    The step of batch j stands in the list of iteration j + 1, at the last possible
    place: before this stage's first forward that reads W(j + 1), and before the last
    backward of batch j + 1, which starts the next reduction. Each late microbatch above
    d - 1 gives the step the time of an F and a B.

    late            K: a number, a share of the batch such as "25%" (at least one
                    microbatch), or "all", as in the paper
    memory          "two-slots": batch j + 1 accumulates while batch j is reduced and
                    clipped. "one-slot": the first backward of batch j + 1 needs the
                    memory of batch j's gradients, so it waits for the step. "shard" and
                    "host": it waits for the reduction, after which one shard of them is
                    kept, or all of them in host memory.
    extra_warmup    k for each boundary between stages, first to last (one number stands
                    for all): the stages before it run k more forwards ahead. A
                    microbatch crosses a boundary twice, F down and B up, between a
                    stage's F and its B. With k = 0 both messages add to every
                    microbatch's time; with k each is hidden up to k / 2 of that time.
                    For slow links; it costs the activations of k microbatches.
    sync_iterations the first n batches have no late microbatches. Batch 0 never has.
    predicts        with all late: PREDICT of batch j + 1 stands before its first
                    forward on the stage, or before REDUCE of batch j if that comes
                    first. W(j) is complete there, and nothing has read its store yet:
                    the prediction takes its place. So the first late batch, whose W(j)
                    batch j reads too, is not predicted.
    lead            PREDICT stands so many microbatches earlier, which hide its
                    communication; at most as many as leave the first stage one
                    microbatch to predict from
    """

    name = "2bw"
    summary = "no flush, two weight versions, gradient delay 1"
    flushes = False
    late_step = True

    late: int | str = "all"
    memory: str = "two-slots"
    extra_warmup: tuple[int, ...] = ()
    sync_iterations: int = 0
    predicts: bool = False
    lead: int = 0

    def ahead(self, shape: Shape, stage: int) -> int:
        boundaries = shape.stages - 1
        extra = self.extra_warmup
        if len(extra) == 1:
            extra = extra * boundaries
        return boundaries - stage + sum(extra[stage:boundaries])

    def late_of(self, microbatches: int) -> int:
        """K in a batch of so many microbatches."""
        if self.late == "all":
            return microbatches
        if isinstance(self.late, int):
            return min(self.late, microbatches)
        percent = int(self.late.removesuffix("%"))
        return max(percent * microbatches // 100, min(percent, 1))

    def reads_late(self, version: int) -> bool:
        # W(v) is read by batch v + 1, one update late; and by batch v itself if all of
        # that runs without delay.
        return version >= max(self.sync_iterations, 1) and self.late not in NONE_LATE

    def version(self, shape: Shape, stage: int, microbatch: int) -> int:
        batch = shape.batch(microbatch)
        place = microbatch % shape.microbatches
        if self.reads_late(batch) and place < self.late_of(shape.microbatches):
            return batch - 1
        return batch

    def crossing(self, shape: Shape, stage: int, batch: int) -> int:
        if not self.reads_late(batch):
            return 0
        return min(self.late_of(shape.microbatches), self.ahead(shape, stage))

    def actions(self, shape: Shape, stage: int, iteration: int) -> list[Action]:
        order = self.order(shape, stage, iteration)
        if iteration + 1 < shape.end and self.is_predicted(shape, iteration + 1):
            known = self.known(shape, stage)
            last = _backwards(order)[known - 1]
            order.insert(last + 1, Action(PREDICT, iteration + 1, iteration))
        if iteration > shape.first:
            order.insert(self._latest(order, iteration), step(iteration - 1))
        order.append(reduce(iteration))
        if iteration == shape.end - 1:
            order.append(step(iteration))
        return order

    def _latest(self, order: list[Action], iteration: int) -> int:
        """The index in `order` for the step of batch `iteration - 1`, which writes
        W(iteration)."""
        backwards = _backwards(order)
        readers = []
        for place, action in enumerate(order):
            if action.kind != B and action.version == iteration:
                readers.append(place)
        latest = backwards[-1]
        if self.memory == "one-slot":
            latest = backwards[0]
        return min([latest, *readers])

    def known(self, shape: Shape, stage: int) -> int:
        """The microbatches of a batch whose gradients the stage has when it predicts
        the next weights."""
        lead = min(self.lead, shape.microbatches - self.ahead(shape, 0) - 1)
        return shape.microbatches - self.ahead(shape, stage) - lead

    def is_predicted(self, shape: Shape, batch: int) -> bool:
        if not self.predicts or batch <= shape.first:
            return False
        if shape.microbatches <= self.ahead(shape, 0):  # the first stage knows nothing
            return False
        return self.reads_late(batch - 1)

    def max_versions(self, shape: Shape, stage: int) -> int:
        return 2

    def max_in_flight(self, shape: Shape, stage: int) -> int:
        crossing = self.crossing(shape, stage, self.sync_iterations + 1)
        return min(self.ahead(shape, stage) + 1, shape.microbatches + crossing)


def _backwards(order: list[Action]) -> list[int]:
    """The indices of the backwards in `order`."""
    backwards = []
    for place, action in enumerate(order):
        if action.kind == B:
            backwards.append(place)
    return backwards
