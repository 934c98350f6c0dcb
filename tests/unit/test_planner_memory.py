"""The planner's bytes: Korthikanti's formulas, Megatron's bytes a parameter, and what
no stage may exceed."""

import itertools
from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from megatron_2bw.schedules import B, F, Shape
from megatron_2bw.tools.planner.cost.memory import (
    Memory,
)
from megatron_2bw.tools.planner.descriptions.model import Model
from megatron_2bw.tools.planner.descriptions.plan import Plan
from tests.unit.test_planner_search import planned, property_of

GPT = Model("gpt", 16, 1024, 16, vocab=50257, sequence=512)
FLUSH = Plan(1, 4, 2, 2, 8, schedule="pipedream-flush")
TWO_BW = replace(FLUSH, schedule="2bw")


def near(number: float):
    """But for rounding."""
    return approx(number, rel=1e-12)


# --- activations of a layer (arXiv 2205.05198, section 4)
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize(
    "b, s, h, a", [(1, 512, 1024, 16), (4, 2048, 6144, 64), (3, 128, 256, 8)]
)
def test_a_layers_activations_are_korthikantis(b, s, h, a, t):
    model = Model("gpt", 4, h, a, sequence=s)

    def kept(sequence_parallel: bool, recompute: str) -> float:
        plan = Plan(t, 1, 1, b, 1, recompute, sequence_parallel=sequence_parallel)
        return Memory(model, "bf16", flash=False).layer(plan)[0]

    sbh = s * b * h
    scores = 5 * a * s / (h * t)
    if t == 1:
        assert kept(False, "none") == near(sbh * (34 + 5 * a * s / h))
    assert kept(False, "none") == near(sbh * (10 + 24 / t + scores))
    assert kept(True, "none") == near(sbh * (34 / t + scores))
    assert kept(False, "selective") == near(sbh * (10 + 24 / t))
    assert kept(True, "selective") == near(sbh * 34 / t)
    assert kept(False, "full") == 2 * sbh
    assert kept(True, "full") == 2 * sbh / t


def test_a_layers_activations_by_hand_beyond_the_paper():
    b, s, h, a = 2, 512, 1024, 16
    tokens = b * s
    plan = Plan(1, 1, 1, b, 1)

    def kept(flash: bool = True, precision: str = "bf16", t: int = 1, **model) -> float:
        memory = Memory(replace(GPT, **model), precision, flash)
        return memory.layer(replace(plan, tensor=t))[0]

    row = 4 * b * s * a  # flash attention keeps one number a row
    scores = a * s * s * b
    assert kept() == 34 * tokens * h + row
    assert kept(t=4) == (10 + 24 / 4) * tokens * h + row / 4
    assert kept(dropout=False) == 32 * tokens * h + row  # two masks less
    assert kept(precision="fp32") == 66 * tokens * h + row  # the masks stay bytes
    assert kept(flash=False, precision="fp32") == 66 * tokens * h + 9 * scores
    assert kept(flash=False, dropout=False) == 32 * tokens * h + 2 * scores
    # both halves and their product, instead of two of 4h
    halves = tokens * 2 * (2 * 4 * h - 3 * 2048)
    assert kept(gated=True, ffn=2048) == 34 * tokens * h + row - halves
    # keys and values of a quarter of the heads
    assert kept() - kept(groups=4) == tokens * 2 * 2 * (h - h // 4)


# --- bytes a parameter
# --------------------------------------------------------------------------------------


# Megatron's docs/dist_optimizer.md; with 2bw a version more and, with two slots, a slot
# of gradients more.
@pytest.mark.parametrize(
    "precision, whole, divided, version, slot",
    [("bf16", 18, 12, 2, 4), ("fp16", 20, 16, 2, 2), ("fp32", 16, 8, 4, 4)],
)
@pytest.mark.parametrize("width", [1, 2, 8, 64])
def test_bytes_a_parameter(precision, whole, divided, version, slot, width):
    memory = Memory(GPT, precision, False)
    assert sum(memory.a_parameter(FLUSH, 1)) == whole
    sharded = whole - divided + divided / width
    flush = replace(FLUSH, width=width, distributed_optimizer=True)
    assert sum(memory.a_parameter(flush, 1)) == approx(sharded, rel=1e-15)
    late = replace(flush, schedule="2bw")
    for name, slots in (("one-slot", 0), ("two-slots", 1), ("shard", 1 / width)):
        expected = sharded + version + slots * slot
        size = sum(memory.a_parameter(replace(late, memory=name), 2))
        assert size == approx(expected, rel=1e-15)


def test_gradients_in_16_bits_are_copied_into_32_bits_by_a_step():
    memory = Memory(GPT, "bf16", False)
    plan = replace(FLUSH, width=4, distributed_optimizer=True)
    # (weights, gradients, optimizer)
    assert memory.a_parameter(plan, 1) == (2, 4, 12 / 4)
    plan = replace(plan, grad_reduce_in_bf16=True)
    assert memory.a_parameter(plan, 1) == (2, 2, 16 / 4)


def test_extra_warmup_keeps_microbatches_and_messages_of_the_stages_before_the_boundary():
    memory = Memory(GPT, "bf16", False)
    more = replace(TWO_BW, extra_warmup=(0, 2, 0))
    kept = memory.layer(more)[0]
    message = 2 * 512 * 1024 * 2
    for stage, (plain, ahead) in enumerate(
        zip(memory.stages(TWO_BW), memory.stages(more))
    ):
        extra = 2 if stage < 2 else 0
        mask = 2 * 512 * 1024 if stage == 0 else 0
        assert ahead.activations - plain.activations == near(extra * (4 * kept + mask))
        assert ahead.buffers - plain.buffers == (4 * message if stage in (1, 2) else 0)
        assert (ahead.weights, ahead.gradients, ahead.logits) == (
            plain.weights,
            plain.gradients,
            plain.logits,
        )
    assert memory.heaviest(more) == max(stage.total for stage in memory.stages(more))


@pytest.mark.parametrize("distributed", [False, True])
def test_the_correction_and_torchs_adam_take_four_bytes_a_parameter_each(distributed):
    """The correction over replicas also a copy of the gradient, since it predicts."""
    plan = replace(TWO_BW, distributed_optimizer=distributed)
    apex, torch = (
        Memory(GPT, "bf16", False, torch_adam) for torch_adam in (False, True)
    )
    for stage in range(4):
        more = near(
            4 * apex.parameters(plan, stage, 4) / (plan.width if distributed else 1)
        )
        before, after = (
            apex.stage(replace(plan, corrected=flag), stage, 4)
            for flag in (False, True)
        )
        assert after.optimizer - before.optimizer == more
        copied = after.gradients - before.gradients
        assert copied == near(4 * apex.parameters(plan, stage, 4))
        # during a late step
        assert torch.stage(plan, stage, 4).buffers - before.buffers == more
    # its step may take what the activations had, or more
    assert torch.stages(FLUSH) == apex.stages(FLUSH)
    small = replace(FLUSH, recompute="full", microbatch=1)
    last = FLUSH.depth - 1
    stage = torch.stage(small, last, 4)
    roots = 4 * torch.parameters(small, last, 4)
    assert stage.total == near(
        stage.weights + stage.gradients + stage.optimizer + roots
    )


# --- a stage
# --------------------------------------------------------------------------------------


def test_a_stage_by_hand():
    """GPT on 4 stages, 2bw: the second holds 3 microbatches of 4 layers, the last one,
    with its logits."""
    b = 2
    s = 512
    h = 1024
    a = 16
    v = 50304
    first, second, _, last = Memory(GPT, "bf16", False).stages(TWO_BW)
    layer = s * b * h * (34 + 5 * a * s / h)
    message = 2 * s * b * h
    # and the gradients while one layer goes backwards
    assert second.activations == 3 * 4 * layer + layer / 2
    # and the mask after the embedding
    assert first.activations == 4 * 4 * layer + layer / 2 + 4 * s * b * h
    assert last.activations == 4 * layer + layer / 2
    assert (first.logits, second.logits) == (0, 0)
    # softmax of 4 bytes, computed in place; logits of 2; the inputs of the final norm
    # and of the output layer
    assert last.logits == s * b * v * (4 + 2) + 2 * 2 * s * b * h
    assert (first.buffers, second.buffers, last.buffers) == (
        4 * message,
        8 * message,
        4 * message,
    )
    parameters = 4 * (12 * h * h + 13 * h)
    assert (second.weights, second.gradients, second.optimizer) == (
        4 * parameters,
        8 * parameters,
        12 * parameters,
    )
    assert first.weights == 4 * (parameters + v * h + s * h)
    assert last.weights == 4 * (parameters + v * h + 2 * h)
    assert second.total == sum(astuple(second))


def test_a_recompute_of_several_layers_keeps_one_input_and_holds_all_of_them():
    """Five layers, 2 at a time: three inputs a microbatch, two whole layers during the
    recompute."""
    memory = Memory(GPT, "bf16", False)
    plan = Plan(1, 4, 1, 2, 8, "full", first=5, last=5)
    whole = memory.layer(replace(plan, recompute="none"))[0]
    size = 2 * 2 * GPT.sequence * GPT.hidden
    stages = {
        n: memory.stage(replace(plan, recompute_layers=n), 1, 5).activations
        for n in (1, 2, 5, 9)
    }
    assert stages == {
        1: approx(3 * 5 * size + 1.5 * whole),
        2: approx(3 * 3 * size + 2.5 * whole),
        5: approx(3 * size + 5.5 * whole),
        9: approx(3 * size + 5.5 * whole),
    }


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_megatrons_loss_holds_the_logits_that_are_counted(precision, monkeypatch):
    """The most bytes at a time of the output layer and the loss of one microbatch, by
    torch's profiler."""
    import torch
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    # one rank
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    tokens = 128
    vocab = 8192
    floats = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    hidden, words = (
        torch.randn(size, 2, dtype=floats, requires_grad=True)
        for size in (tokens, vocab)
    )

    def loss() -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden.unsqueeze(1), words)
        labels = torch.zeros(tokens, 1, dtype=torch.int64)
        return vocab_parallel_cross_entropy(logits, labels, tp_group=object()).sum()

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        loss().backward()
    events = [
        event
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    changes = [
        event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())
    ]
    model = Model("gpt", 1, 2, 1, vocab=vocab, sequence=tokens, dropout=False)
    counted = (
        Memory(model, precision, False)
        .stage(Plan(1, 1, 1, 1, 1, schedule="megatron"), 0, 1)
        .logits
    )
    assert max(itertools.accumulate(changes)) == approx(counted, rel=0.05)


def most_kept(plan: Plan, stage: int, chunks: set[int]) -> int:
    """Counted from the stage's actions: forwards of `chunks` that wait for their
    backwards, at most."""
    now = 0
    most = 0
    for action in plan.pipeline.actions(
        Shape(plan.depth, plan.microbatches, 0, 1), stage, 0
    ):
        now += {F: 1, B: -1}.get(action.kind, 0) * (action.chunk in chunks)
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    "depth, virtual, microbatches",
    [(2, 2, 4), (4, 2, 8), (8, 2, 16), (4, 4, 4), (8, 4, 24)],
)
def test_interleaved_stages_keep_what_their_lists_of_actions_keep(
    depth, virtual, microbatches
):
    """The logits are those of the last chunk alone, the embedding's mask is the first
    one's."""
    plan = Plan(1, depth, 1, 1, microbatches, schedule="megatron", virtual=virtual)
    dropping = Memory(replace(GPT, layers=2 * depth * virtual), "bf16", False)
    memory = Memory(replace(dropping.model, dropout=False), "bf16", False)
    chunks = [most_kept(plan, stage, set(range(virtual))) for stage in range(depth)]
    layer, working = memory.layer(plan)
    assert [
        (stage.activations - working) / (2 * layer) for stage in memory.stages(plan)
    ] == chunks
    last = most_kept(plan, depth - 1, {virtual - 1})
    tokens = 512
    v = 50304
    h = 1024
    assert memory.stages(plan)[-1].logits == tokens * (
        v * (4 * last + 2) + 4 * h * last
    )
    layer, working = dropping.layer(plan)
    mask = dropping.stages(plan)[0].activations - working - chunks[0] * 2 * layer
    assert mask == near(most_kept(plan, 0, {0}) * tokens * h)


# --- all stages
# --------------------------------------------------------------------------------------


@property_of(200)
@given(planned(), st.booleans())
def test_the_heaviest_stage_is_the_heaviest_of_all(case, flash):
    cost, plan = case
    memory = Memory(cost.model, cost.precision, flash)
    stages = memory.stages(plan)
    assert len(stages) == plan.depth
    assert memory.heaviest(plan) == max(stage.total for stage in stages)
    assert all(min(astuple(stage)) >= 0 for stage in stages)


def test_the_optimizer_in_host_memory():
    """In bf16: two versions and one gradient slot on the GPU; 4 + 4 + 8 + 2 bytes on
    the host, by the replicas."""
    plan = Plan(1, 2, 4, 1, 8, memory="host", distributed_optimizer=True)
    memory = Memory(GPT, "bf16", flash=True)
    assert memory.a_parameter(plan, 2) == (4, 4, 0)
    largest = max(
        memory.parameters(plan, stage, layers)
        for stage, layers in enumerate(plan.layers_of(GPT))
    )
    assert max(memory.host_bytes(plan)) == largest * 18 / 4
    assert max(memory.host_bytes(plan.changed(corrected=True))) == largest * 22 / 4
