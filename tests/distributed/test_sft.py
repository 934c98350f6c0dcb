"""2BW on conversations: the loss is that of the targets alone, and the bits are the
reference's."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.distributed.compare import UNTIED, assert_same, run_pipeline, run_reference
from tests.distributed.training import command
from tests.unit.test_sft import stored

pytestmark = pytest.mark.cpu

# A batch holds each of the eight once; the longest fills --seq-length 16, the others
# are padded. A prompt is negative.
CHATS = [
    [word if k % 3 else ~word for k, word in enumerate(range(9 * i, 11 * i + 3))]
    for i in range(8)
]

# Two of these fill a sample, and a batch holds each of the sixteen once.
SHORT = [
    [word if k % 3 else ~word for k, word in enumerate(range(5 * i, 5 * i + 8))]
    for i in range(16)
]


def by_hand(run, model, conversations) -> None:
    """The mean loss of all targets, from each conversation alone without padding."""
    from megatron.core.utils import unwrap_model

    total, targets = 0.0, 0
    for words in conversations:
        tokens = torch.tensor([word if word >= 0 else -1 - word for word in words])
        inputs = tokens[None, :-1]
        hidden = torch.triu(torch.ones(1, 1, inputs.numel(), inputs.numel()), 1).bool()
        with torch.no_grad():
            logits = unwrap_model(model)(
                inputs, torch.arange(inputs.numel())[None], hidden
            )[0]
        for place, word in enumerate(words[1:]):
            if word >= 0:
                total -= torch.log_softmax(logits[place], -1)[word]
                targets += 1
    run.losses = [total / targets]


PER_TOKEN = "--calculate-per-token-loss"


@pytest.mark.proof("per token")
@pytest.mark.parametrize(
    "stages, flags",
    [(2, ()), (2, (PER_TOKEN,)), (4, (PER_TOKEN, "--sft-packed"))],
    ids=["per microbatch", "per token", "packed"],
)
def test_the_targets_alone_count(tmp_path, stages, flags):
    """Packed conversations do not see each other, on the stages between the ends
    either."""

    def argv(stages: int, schedule: str = "2bw", **changes) -> list[str]:
        changes = dict(split="100,0,0", clip_grad=0) | changes
        words = command(stages, 4, schedule, UNTIED, "--sft-data", *flags, **changes)
        return [word for word in words if word != "--mock-data"] + [
            "--data-path",
            str(prefix),
        ]

    conversations = SHORT if "--sft-packed" in flags else CHATS
    prefix = stored(tmp_path / "chats", conversations)
    runs = run_pipeline(argv(stages), stages)
    assert_same(runs, run_reference(runs, argv(1), 4), exact=True)
    # the weights stay those of the start
    frozen = dict(lr=1e-30, min_lr=0, lr_warmup_iters=0, train_iters=1)
    compute = functools.partial(by_hand, conversations=conversations)
    expected = run_pipeline(argv(1, "megatron", **frozen), 1, None, compute)[0].losses[
        0
    ]
    torch.testing.assert_close(runs[-1].losses[0], expected, rtol=1e-6, atol=0)
    assert runs[-1].losses[-1] < runs[-1].losses[0], "it learns"


def test_a_batch_schedule_has_enough_samples(tmp_path):
    """Megatron asks the dataset for as many batches of the smallest size: 12 samples,
    where 40 are used."""
    sizes = dict(
        global_batch_size=None, step_batch_size_schedule="0:4 128:8", split="100,0,0"
    )
    argv = command(
        1,
        2,
        "2bw",
        UNTIED,
        "--sft-data",
        "--data-path",
        stored(tmp_path / "chats", CHATS),
        **sizes,
    )
    argv = [str(word) for word in argv if word != "--mock-data"]
    runs = run_pipeline(argv, 1)
    assert_same(runs, run_reference(runs, argv, (2, 2, 4, 4, 4, 4)), exact=True)
