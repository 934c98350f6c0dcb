"""PipeDream-2BW on plain PyTorch: a small network in stages, and one process that
follows the same update rule.

    python examples/plain_torch.py --stages 2              # starts its own ranks
    torchrun --nproc-per-node 2 examples/plain_torch.py    # or runs as torchrun's

Each stage runs the actions of its schedule: forwards and backwards of microbatches,
messages to its neighbours, one update per batch. The update of batch j (gradient norm
over all stages, clipping, Adam) runs in a thread while batch j + 1 computes. So no
stage waits for another at the end of a batch, and every gradient is late by one update.
Tensors are on the CPU and messages go over gloo; `LateUpdate` says what changes for a
step on a GPU.
"""

import argparse
import os
import tempfile
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn

from megatron_2bw import (
    LateUpdate,
    Pipeline,
    Shape,
    TwoBW,
    WeightStores,
    Worker,
    connect,
)

SAMPLES = 8
WIDTH = 16
LAYERS = 4
MICROBATCHES = 4
ITERATIONS = 20
CLIP = 0.05


def data(microbatch):
    """Inputs and targets [SAMPLES, WIDTH] of one microbatch; batch j holds MICROBATCHES
    of them."""
    generator = torch.Generator().manual_seed(microbatch)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    return inputs, inputs.flip(1).tanh()


def layers_of(stage, stages):
    """The layers of one stage, with the same weights for every number of stages."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    first = stage * LAYERS // stages
    end = (stage + 1) * LAYERS // stages
    return nn.Sequential(*layers[first:end])


class ModuleStage:
    """What `Pipeline` asks of a stage: an empty tensor for a message, a forward, a
    backward."""

    def __init__(self, layers, is_last, microbatches=MICROBATCHES):
        self.layers = layers
        self.is_last = is_last
        self.microbatches = microbatches
        self.losses = defaultdict(float)  # by batch

    def receive_buffer(self):
        return torch.empty(SAMPLES, WIDTH)

    def forward(self, microbatch, received):
        inputs, targets = data(microbatch)
        output = self.layers(inputs if received is None else received)
        if not self.is_last:
            return output
        # so that a batch's gradients add up
        loss = nn.functional.mse_loss(output, targets) / self.microbatches
        self.losses[microbatch // self.microbatches] += loss.detach()
        return loss

    def backward(self, microbatch, received, output, gradient):
        output.backward(gradient)
        return None if received is None else received.grad


def copies(params):
    return [param.detach().clone() for param in params]


def square_of(gradients):
    return sum(gradient.square().sum() for gradient in gradients)


def make_step(params, gather):
    """The step of one stage: clip by the norm over all stages, Adam on main parameters,
    write the weights to `target`.

    gather: from a tensor of this stage to the list of all stages' tensors
    """
    mains = copies(params)
    adam = torch.optim.Adam(mains, lr=1e-2)

    def step(gradients, target):
        square = square_of(gradients)
        norm = sum(gather(square)).sqrt()
        for main, gradient in zip(mains, gradients):
            main.grad = gradient * (CLIP / norm).clamp(max=1)
        adam.step()
        for tensor, main in zip(target, mains):
            tensor.copy_(main)
        return True

    return step


def late_update(schedule, stores, step):
    return LateUpdate(stores, Worker("late step", torch.device("cpu")), step)


def train(schedule, shape, index, neighbours, gather, make_update=late_update):
    """Train stage `index`. Returns the batches' losses (on the last stage) and the
    final weights."""
    layers = layers_of(index, shape.stages)
    stage = ModuleStage(layers, index == shape.stages - 1, shape.microbatches)
    stores = WeightStores(layers.parameters(), schedule.max_versions(shape, index))
    update = make_update(schedule, stores, make_step(stores.params, gather))
    pipeline = Pipeline(schedule, shape, index, neighbours, stage, update)
    for iteration in range(shape.first, shape.end):
        pipeline.run(iteration)
    neighbours.flush()
    stores.bind_newest()
    return list(stage.losses.values()), copies(stores.params)


def reference(stages):
    """2BW without a pipeline: W(j+1) = W(j) - update(gradient of batch j at W(max(j-1,
    0))) (paper, section 3.1)."""
    parts = [layers_of(stage, stages) for stage in range(stages)]
    model = ModuleStage(nn.Sequential(*parts), is_last=True)
    params = [list(part.parameters()) for part in parts]
    squares = []
    steps = [make_step(own, lambda square: squares) for own in params]
    weights = [[copies(own) for own in params]]  # of each version, by stage
    for batch in range(ITERATIONS):
        for own, values in zip(params, weights[max(batch - 1, 0)]):
            for param, value in zip(own, values):
                param.data = value
                param.grad = None
        for microbatch in range(batch * MICROBATCHES, (batch + 1) * MICROBATCHES):
            model.backward(microbatch, None, model.forward(microbatch, None), None)
        gradients = [[param.grad for param in own] for own in params]
        squares[:] = map(square_of, gradients)
        weights.append([copies(own) for own in weights[0]])  # the steps fill them
        for step, own, target in zip(steps, gradients, weights[-1]):
            step(own, target)
    return list(model.losses.values())


def main(rank, stages, init_method):
    torch.set_num_threads(1)  # as many on all ranks, so that sums have one order
    dist.init_process_group(
        "gloo", init_method=init_method, rank=rank, world_size=stages
    )
    neighbours = connect(list(range(stages)), rank)
    group = dist.new_group()  # the step needs one of its own

    def gather(tensor):
        tensors = [torch.empty_like(tensor) for _ in range(stages)]
        dist.all_gather(tensors, tensor, group=group)
        return tensors

    shape = Shape(stages, MICROBATCHES, 0, ITERATIONS)
    losses, _ = train(TwoBW(), shape, rank, neighbours, gather)
    if rank == stages - 1:
        print(f"batch   loss, {stages} stages   loss, one process")
        pairs = zip(losses, reference(stages), strict=True)
        for batch, (loss, expected) in enumerate(pairs):
            same = "the same bits" if torch.equal(loss, expected) else "DIFFERENT"
            print(f"{batch:5}   {loss:14.8f}   {expected:17.8f}   {same}")
    dist.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--stages",
        type=int,
        choices=(1, 2, 4),
        default=2,
        help="ranks that this script starts",
    )
    stages = parser.parse_args().stages
    if "RANK" in os.environ:  # torchrun has started this rank
        main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
    else:
        with tempfile.TemporaryDirectory() as folder:
            store = f"file://{folder}/store"
            torch.multiprocessing.spawn(main, (stages, store), nprocs=stages)
