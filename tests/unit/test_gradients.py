"""Gradient slots on Megatron's own buffers' shape, with stand-ins for what needs process groups."""

from __future__ import annotations

import types

import torch

from megatron_2bw.mcore.grad_buffers import GradientSlots


def wrapper():
    """The part of Megatron's DistributedDataParallel that the slots use: two buffers, three buckets."""
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (4,), (5,))]
    places = {params[0]: (0, 6, 0), params[1]: (6, 10, 1)}
    first = types.SimpleNamespace(grad_data=torch.zeros(10), param_index_map=places)
    second = types.SimpleNamespace(grad_data=torch.zeros(5), param_index_map={params[2]: (0, 5, 0)})
    first.buckets = [types.SimpleNamespace(offset=a, grad_data=first.grad_data[a:b]) for a, b in ((0, 6), (6, 10))]
    second.buckets = [types.SimpleNamespace(offset=0, grad_data=second.grad_data)]
    groups = []
    for bucket, param in zip((*first.buckets, *second.buckets), params):
        groups.append(
            types.SimpleNamespace(
                buckets=[bucket],
                params={param},
                param_to_bucket={param: bucket},
                data_parallel_group="megatron's",
                previous_grad_reduce_bucket_group=groups[-1] if groups else None,
                golden_per_param_grad_ready_counts={param: 1},
                per_param_grad_ready_counts={param: 1},
                cached_grad_buffer_shard_list=["cached"],
            )
        )
    ddp = types.SimpleNamespace(buffers=[first, second], bucket_groups=groups, param_to_bucket_group={})

    def zero():
        for buffer in ddp.buffers:
            buffer.grad_data.zero_()

    ddp.zero_grad_buffer = zero
    for buffer in ddp.buffers:
        for param, (start, end, _) in buffer.param_index_map.items():
            param.main_grad = buffer.grad_data[start:end].view(param.shape)
    return ddp, params


def accumulate(params, value: float) -> None:
    for param in params:
        param.main_grad.add_(value)


def run_batch(slots: GradientSlots, params, batch: int, value: float):
    slots.begin_batch(batch)
    slots.bind(batch)
    accumulate(params, value)
    return slots.gradients_of(batch)


def test_two_slots_alternate_and_share_nothing():
    ddp, params = wrapper()
    slots = GradientSlots(ddp, 2, "ours", first=5)
    first = run_batch(slots, params, 5, 1)
    second = run_batch(slots, params, 6, 2)
    assert all(torch.all(first.main_grads[param] == 1) for param in params)
    assert all(torch.all(second.main_grads[param] == 2) for param in params)
    slots.begin_batch(7)  # the first slot again, zeroed
    slots.bind(7)
    assert all(torch.all(first.main_grads[param] == 0) for param in params)
    assert all(param.main_grad is first.main_grads[param] for param in params)
    assert all(torch.all(second.main_grads[param] == 2) for param in params)


def test_forwards_of_the_next_batch_see_its_slot():
    """A fused kernel notes main_grad in the forward, w microbatches before the backward."""
    ddp, params = wrapper()
    slots = GradientSlots(ddp, 2, "ours")
    slots.begin_batch(0)
    slots.bind(1)
    noted = [param.main_grad for param in params]
    slots.bind(0)
    accumulate(params, 1)
    full = slots.gradients_of(0)
    slots.begin_batch(1)
    slots.bind(1)
    assert all(before is param.main_grad for before, param in zip(noted, params))
    assert all(torch.all(full.main_grads[param] == 1) for param in params)


def test_buckets_reduce_the_memory_of_their_own_slot():
    ddp, params = wrapper()
    slots = GradientSlots(ddp, 2, "ours")
    for batch, value in enumerate((1, 2)):
        slot = run_batch(slots, params, batch, value)
        assert ddp.bucket_groups is slot.bucket_groups and ddp.buffers is slot.buffers
        assert [group.data_parallel_group for group in slot.bucket_groups] == ["ours"] * 3
        for group, param in zip(slot.bucket_groups, params):
            (bucket,) = group.buckets
            assert torch.all(bucket.grad_data == value) and group.param_to_bucket[param] is bucket
            assert bucket.grad_data.data_ptr() == slot.main_grads[param].data_ptr()
            assert slot.group_of[param] is group is ddp.param_to_bucket_group[param]
        assert slot.bucket_groups[2].previous_grad_reduce_bucket_group is slot.bucket_groups[1]


def test_one_slot_is_zeroed_when_its_batch_begins_and_not_before():
    ddp, params = wrapper()
    slots = GradientSlots(ddp, 1, "ours")
    full = run_batch(slots, params, 0, 3)
    ddp.zero_grad_buffer()  # Megatron's training step, at the beginning of the next iteration
    slots.bind(1)
    assert all(torch.all(full.main_grads[param] == 3) for param in params)
    slots.begin_batch(1)
    assert all(torch.all(full.main_grads[param] == 0) for param in params)
