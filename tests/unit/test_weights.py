"""Weight stores: a microbatch's backward must see the storage of its forward, whatever
its operators save."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_2bw.engine.weights import WeightStores


class LeafSaving(torch.autograd.Function):
    """x @ w, saving the leaf Parameter itself: its data is read when the backward runs
    (as Megatron's linears do)."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


class ThreeOps(torch.nn.Module):
    """One of each kind of operator of docs/design.md, rule 1, and parameters of two
    dtypes."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        new = lambda *shape, dtype=torch.float32: torch.nn.Parameter(
            torch.randn(*shape, generator=generator).to(dtype)
        )
        self.leaf, self.linear, self.scale = new(4, 4), new(4, 4), new(4, 2)
        self.low = new(4, dtype=torch.bfloat16)

    def forward(self, x):
        x = LeafSaving.apply(x, self.leaf)
        x = F.linear(x, self.linear)  # saves linear.t(), a view taken in the forward
        x = x * self.scale.view(2, 4)[0]  # saves another view
        return (x * self.low).pow(2).sum()


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 4, generator=generator) for _ in range(count)]


def expected_gradients(
    versions: list[dict], batch: int, x: torch.Tensor
) -> list[torch.Tensor]:
    """Gradients of batch `batch` on W(max(batch - 1, 0)), from a model that nothing
    happens to."""
    model = ThreeOps()
    model.load_state_dict(versions[max(batch - 1, 0)])
    return list(torch.autograd.grad(model(x), list(model.parameters())))


def update(model: ThreeOps, batch: int) -> None:
    """An in-place step, as the fp32 optimizers make it."""
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.full_like(param, 0.1 * (batch + 1)))


def snapshot(model) -> dict:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_backward_sees_the_weights_of_its_forward():
    """2BW with one microbatch always in flight over a step: gradients equal those of
    untouched copies."""
    model, xs = ThreeOps(), batches(5)
    stores = WeightStores(model.parameters(), slots=2)
    versions, loss = [snapshot(model)], None
    for batch in range(4):
        if batch == 0:
            stores.bind(0)
            loss = model(xs[0])
        stores.bind(batch)
        # the next batch's forward runs before this batch's backward
        early = model(xs[batch + 1])
        stores.bind(max(batch - 1, 0))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for found, expected in zip(
            gradients, expected_gradients(versions, batch, xs[batch])
        ):
            assert torch.equal(found, expected)
        with stores.writing({batch}):
            for param in model.parameters():
                # the optimizer writes this from its main parameter
                if param.dtype == torch.bfloat16:
                    param.data.copy_(versions[batch]["low"])
            update(model, batch)
        versions.append(snapshot(model))
        for name, value in versions[-2].items():
            assert torch.equal(
                versions[-1][name], value + torch.full_like(value, 0.1 * (batch + 1))
            )
        loss = early


def test_stores_are_contiguous_by_dtype():
    model = ThreeOps()
    WeightStores(model.parameters(), slots=2)
    storages = {
        (param.dtype, param.untyped_storage().data_ptr())
        for param in model.parameters()
    }
    assert len(storages) == 2  # one fp32, one bf16
    # each padded to 64 elements
    assert model.leaf.untyped_storage().nbytes() == 4 * 3 * 64


def test_skipped_step_advances_the_version_without_a_copy():
    model = ThreeOps()
    stores = WeightStores(model.parameters(), slots=2)
    before, pointers = (
        snapshot(model),
        [param.data_ptr() for param in model.parameters()],
    )
    with stores.writing({0}) as write:
        write.stepped = False
    assert stores.versions == [0, 1]
    assert [param.data_ptr() for param in model.parameters()] == pointers
    with stores.writing({1}):
        update(model, 0)
    stores.bind(1)
    assert all(
        torch.equal(before[name], value) for name, value in model.state_dict().items()
    )
    stores.bind(2)
    assert not torch.equal(before["leaf"], model.leaf)


def test_one_slot_is_written_in_place_only_when_nobody_reads_it():
    model = ThreeOps()
    stores = WeightStores(model.parameters(), slots=1)
    with stores.writing(set()):
        update(model, 0)
    assert stores.versions == [1]
    with pytest.raises(RuntimeError, match="in use"), stores.writing({1}):
        pass
