"""2BW on conversations: the loss is that of the targets alone, and the bits are the
reference's."""

import functools

import pytest
import torch

from tests.distributed.compare import UNTIED, assert_same, run_pipeline, run_reference
from tests.distributed.training import command
from tests.unit.test_sft import stored

pytestmark = pytest.mark.cpu


def conversation(first: int, end: int) -> list[int]:
    """Each third word, from the first on, is a prompt's, which is negative."""
    words = list(range(first, end))
    words[::3] = [~word for word in words[::3]]
    return words


# A batch holds each of the eight once; the longest fills --seq-length 16, the others
# are padded.
CHATS = [conversation(9 * i, 11 * i + 3) for i in range(8)]

# Two of these fill a sample, and a batch holds each of the sixteen once.
SHORT = [conversation(5 * i, 5 * i + 8) for i in range(16)]


def by_hand(run, model, conversations) -> None:
    """The mean loss of all targets, from each conversation alone without padding."""
    from megatron.core.utils import unwrap_model

    total = 0.0
    targets = 0
    for words in conversations:
        words = torch.tensor(words)
        inputs = torch.where(words < 0, ~words, words)[None, :-1]
        size = inputs.numel()
        hidden = torch.ones(1, 1, size, size).triu(1).bool()
        with torch.no_grad():
            logits = unwrap_model(model)(inputs, torch.arange(size)[None], hidden)
        for scores, word in zip(logits[0], words[1:]):
            if word >= 0:
                total -= scores.log_softmax(-1)[word]
                targets += 1
    run.losses = [total / targets]


def trained_on(data, stages: int, microbatches: int, *flags, schedule="2bw", **changes):
    changes = dict(split="100,0,0") | changes
    flags = [UNTIED, "--sft-data", "--data-path", str(data), *flags]
    argv = command(stages, microbatches, schedule, *flags, **changes)
    argv.remove("--mock-data")
    return argv


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
    conversations = SHORT if "--sft-packed" in flags else CHATS
    data = stored(tmp_path / "chats", conversations)
    argv = trained_on(data, stages, 4, *flags, clip_grad=0)
    runs = run_pipeline(argv, stages)
    argv = trained_on(data, 1, 4, *flags, clip_grad=0)
    assert_same(runs, run_reference(runs, argv, 4))
    # the weights stay those of the start
    frozen = dict(lr=1e-30, min_lr=0, lr_warmup_iters=0, train_iters=1, clip_grad=0)
    argv = trained_on(data, 1, 4, *flags, schedule="megatron", **frozen)
    compute = functools.partial(by_hand, conversations=conversations)
    (alone,) = run_pipeline(argv, 1, None, compute)
    first, *_, last = runs[-1].losses
    assert first.item() == pytest.approx(alone.losses[0].item(), rel=1e-6)
    assert last < first, "it learns"


def test_a_batch_schedule_has_enough_samples(tmp_path):
    """Megatron asks the dataset for as many batches of the smallest size: 12 samples,
    where 40 are used."""
    sizes = dict(global_batch_size=None, step_batch_size_schedule="0:4 128:8")
    argv = trained_on(stored(tmp_path / "chats", CHATS), 1, 2, **sizes)
    runs = run_pipeline(argv, 1)
    sizes = (2, 2, 4, 4, 4, 4)
    assert_same(runs, run_reference(runs, argv, sizes))
