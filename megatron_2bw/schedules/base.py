"""What every schedule answers, and the two orders of actions that the six schedules are made of. Pure Python."""

from __future__ import annotations

from megatron_2bw.schedules.action import REDUCE, STEP, Action, B, F, Shape


class Schedule:
    """A pipeline schedule: for a stage, the list of its actions in an iteration.

    Subclasses give `actions` and the limits that the validator holds them to. One iteration is one batch
    is one weight update.
    """

    name: str
    summary: str
    flushes = True  # the pipeline is empty between iterations
    global_step = True  # the step's gradient norm and inf flag span all stages
    same_version_everywhere = True  # a microbatch runs on the same W on every stage
    chunks = 1  # parts of the model that a stage holds
    late_step = False  # a batch's update is made beside the next batch, between its REDUCE and its STEP
    sync_iterations = 0  # batches at the start that run without delay, in a schedule that delays the others

    def actions(self, shape: Shape, stage: int, iteration: int) -> list[Action]:
        """The actions of `stage` in `iteration`, in order.

        STEP is where the update must be there: at the end of the batch's own iteration, or, with `late_step`, in
        the next one.
        """
        raise NotImplementedError

    def ahead(self, shape: Shape, stage: int) -> int:
        """Forwards before the first backward, the one that alternates with it left out."""
        return shape.warmup(stage)

    def extrapolates(self, version: int) -> bool:
        """Whether W(version) is read only by batches whose gradients come an update late."""
        return False

    def min_microbatches(self, stages: int) -> int:
        """The smallest number of microbatches per batch that the schedule allows."""
        return 1

    def max_versions(self, shape: Shape, stage: int) -> int:
        """Weight versions that `stage` holds at most (Table in docs/schedules.md)."""
        return 1

    def max_in_flight(self, shape: Shape, stage: int) -> int:
        """Microbatches whose activations `stage` holds at most."""
        raise NotImplementedError


def reduce(iteration: int) -> Action:
    """The start of the reduction of batch `iteration`."""
    return Action(REDUCE, iteration, iteration)


def step(iteration: int) -> Action:
    """The step of batch `iteration`, which makes W(iteration + 1)."""
    return Action(STEP, iteration, iteration + 1)


def finish(iteration: int) -> list[Action]:
    """Reduction and step of batch `iteration`, one after the other."""
    return [reduce(iteration), step(iteration)]


def one_forward_one_backward(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then forward and backward in turn, then the backwards that are left (1F1B)."""
    order, rest = forwards[:ahead], forwards[ahead:]
    for index, backward in enumerate(backwards):
        order += rest[index : index + 1]
        order.append(backward)
    return order


def with_flush(schedule: Schedule, shape: Shape, stage: int, iteration: int) -> list[Action]:
    """An iteration that runs on its batch's newest weights, and empties the pipeline before it steps."""
    batch = range(iteration * shape.microbatches, (iteration + 1) * shape.microbatches)
    order = one_forward_one_backward(
        [Action(F, x, iteration) for x in batch], [Action(B, x, iteration) for x in batch], schedule.ahead(shape, stage)
    )
    return order + finish(iteration)


def without_flush(schedule: Schedule, shape: Shape, stage: int, iteration: int) -> list[Action]:
    """Forwards and backwards of an iteration of a pipeline that is never drained (paper, Figure 2).

    Forwards run w = `schedule.ahead(shape, stage)` microbatches ahead of the backwards all through training: for
    k = 0 ... m-1, F(jm + w + k) and B(jm + k). Only the first iteration fills the pipeline, only the last planned one
    empties it.
    `schedule.version(shape, stage, microbatch)` names the weights of a microbatch.
    """
    start = iteration * shape.microbatches
    ahead = schedule.ahead(shape, stage)
    fill = ahead if iteration == shape.first else 0
    forwards = range(start + ahead - fill, min(start + ahead + shape.microbatches, shape.end * shape.microbatches))
    backwards = range(start, start + shape.microbatches)
    return one_forward_one_backward(
        [Action(F, x, schedule.version(shape, stage, x)) for x in forwards],
        [Action(B, x, schedule.version(shape, stage, x)) for x in backwards],
        fill,
    )
