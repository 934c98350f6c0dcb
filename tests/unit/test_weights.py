"""Weight stores: a microbatch's backward must see the storage of its forward, whatever
its operators save."""

import copy

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

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator))

        self.leaf = parameter(4, 4)
        self.linear = parameter(4, 4)
        self.scale = parameter(4, 2)
        self.low = parameter(4)
        self.low.data = self.low.bfloat16()

    def forward(self, x):
        x = LeafSaving.apply(x, self.leaf)
        x = F.linear(x, self.linear)  # saves linear.t(), a view taken in the forward
        x = x * self.scale.view(2, 4)[0]  # saves another view
        return (x * self.low).pow(2).sum()

    def gradients(self, loss) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(loss, list(self.parameters()))

    def update(self, batch: int) -> None:
        """An in-place step, as the fp32 optimizers make it."""
        with torch.no_grad():
            for param in self.parameters():
                param.add_(torch.full_like(param, 0.1 * (batch + 1)))

    def snapshot(self) -> dict:
        return copy.deepcopy(self.state_dict())


def expected_gradients(weights: dict, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """From a model that nothing happens to."""
    model = ThreeOps()
    model.load_state_dict(weights)
    return model.gradients(model(x))


def assert_equal(values, expected) -> None:
    torch.testing.assert_close(values, expected, rtol=0, atol=0)


def test_backward_sees_the_weights_of_its_forward():
    """2BW with one microbatch always in flight over a step: gradients equal those of
    untouched copies."""
    model = ThreeOps()
    xs = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(1))
    stores = WeightStores(model.parameters(), slots=2)
    versions = [model.snapshot()]
    stores.bind(0)
    loss = model(xs[0])
    for batch in range(4):
        stores.bind(batch)
        # the next batch's forward runs before this batch's backward
        early = model(xs[batch + 1])
        late = max(batch - 1, 0)
        stores.bind(late)
        expected = expected_gradients(versions[late], xs[batch])
        assert_equal(model.gradients(loss), expected)
        with stores.writing({batch}):
            # the optimizer writes this from its main parameter
            model.low.data.copy_(versions[batch]["low"])
            model.update(batch)
        versions.append(model.snapshot())
        for name, value in versions[batch].items():
            step = torch.full_like(value, 0.1 * (batch + 1))
            assert_equal(versions[-1][name], value + step)
        loss = early


def test_stores_are_contiguous_by_dtype():
    model = ThreeOps()
    WeightStores(model.parameters(), slots=2)
    storages = set()
    for param in model.parameters():
        storages.add((param.dtype, param.untyped_storage().data_ptr()))
    assert len(storages) == 2  # one fp32, one bf16
    # each padded to 64 elements
    assert model.leaf.untyped_storage().nbytes() == 4 * 3 * 64


def test_skipped_step_advances_the_version_without_a_copy():
    model = ThreeOps()
    stores = WeightStores(model.parameters(), slots=2)
    before = model.snapshot()
    pointer = model.leaf.data_ptr()
    with stores.writing({0}) as write:
        write.stepped = False
    assert stores.versions == [0, 1]
    assert model.leaf.data_ptr() == pointer
    with stores.writing({1}):
        model.update(0)
    stores.bind(1)
    assert_equal(model.snapshot(), before)
    stores.bind(2)
    assert not torch.equal(before["leaf"], model.leaf)


def test_one_slot_is_written_in_place_only_when_nobody_reads_it():
    model = ThreeOps()
    stores = WeightStores(model.parameters(), slots=1)
    with stores.writing(set()):
        model.update(0)
    assert stores.versions == [1]
    with pytest.raises(RuntimeError, match="in use"), stores.writing({1}):
        pass
