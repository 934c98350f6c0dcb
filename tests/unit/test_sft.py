"""--task sft and --sft-data: which tokens are targets, what a sample holds, what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from megatron_2bw import cpu
from megatron_2bw.data import indexed
from tests.distributed.training import command
from tests.unit.command_lines import complaint, dataset
from tests.unit.test_preprocess import call, files_of

HEADER = "<|im_start|>{{ m.role }}\n"
CHATML = (
    "{% for m in messages %}" + HEADER + "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}" + HEADER + "{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
)
FORGETS = (  # as Qwen3: what it thought is shown in the last answer only
    "{% for m in messages %}" + HEADER + "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHAT = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2 é"}]
LONGER = [{"role": "system", "content": "Sum."}, *CHAT, {"role": "user", "content": "So"}]
LONGEST = [*LONGER, {"role": "assistant", "content": "  OK"}, {"role": "user", "content": "."}]


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu():
    cpu.install()
    yield
    cpu.uninstall()


def tokenizer(folder: Path, template: str | None) -> Path:
    """A byte is a token, so that an expectation can be written as text; `<s>` precedes a text by itself."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    core.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), begin])
    special = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": SPECIAL[2:]}
    fast = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **special)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def prepare(folder: Path, capsys, template, *lines, flags=()) -> tuple[int, str, str]:
    data = folder / "chats.jsonl"
    data.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    words = ["--task", "sft", "--input", data, "--output-prefix", folder / "out"]
    return call(capsys, *words, "--tokenizer-model", tokenizer(folder / "tokenizer", template), *flags)


def shown(folder: Path) -> list[str]:
    """Each conversation as text, with ⟦ ⟧ around its targets."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from transformers import AutoTokenizer

    text, found = AutoTokenizer.from_pretrained(str(folder / "tokenizer")), []
    for words in IndexedDataset(str(folder / "out")):
        edges = [0, *(numpy.flatnonzero(numpy.diff(words >= 0)) + 1), len(words)]
        parts = [words[start:end] for start, end in zip(edges, edges[1:])]
        decoded = [(text.decode(numpy.where(part < 0, ~part, part)), part[0] >= 0) for part in parts]
        found.append("".join(f"⟦{words}⟧" if target else words for words, target in decoded))
    return found


TURN = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
FIRST = "<|im_start|>system\nSum.<|im_end|>\n"
NEXT = "<|im_start|>user\nSo<|im_end|>\n<|im_start|>assistant\n"
LAST = "<|im_start|>user\n.<|im_end|>\n"


def test_the_assistants_text_is_the_target(tmp_path, capsys):
    sharegpt = [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2 é"}]
    lines = [{"messages": CHAT, "id": 3}, {"messages": LONGEST}, {"conversations": sharegpt}]
    status, out, err = prepare(tmp_path, capsys, CHATML, *lines)
    assert status == 0, err
    first = f"{TURN}⟦2 é<|im_end|>\n⟧"
    assert shown(tmp_path) == [first, f"{FIRST}{first}{NEXT}⟦  OK<|im_end|>\n⟧{LAST}", first]
    assert out.endswith(f" --tokenizer-model {tmp_path}/tokenizer --sft-data\n")
    assert indexed.has_prompts(str(tmp_path / "out"))


def test_the_templates_own_marks_come_first(tmp_path, capsys):
    status, _, err = prepare(tmp_path, capsys, MARKED, {"messages": LONGEST})
    assert status == 0, err
    assert shown(tmp_path) == [f"{FIRST}{TURN}⟦2 é<|im_end|>⟧\n{NEXT}⟦  OK<|im_end|>⟧\n{LAST}"]


def test_plain_forms(tmp_path, capsys):
    alpaca = {"instruction": "Add.", "input": "1 1", "output": "2"}
    lines = [{"prompt": "1+1=", "completion": " 2"}, alpaca, {**alpaca, "input": ""}]
    status, _, err = prepare(tmp_path, capsys, None, *lines)
    assert status == 0, err
    task = "Below is an instruction that describes a task"
    paired = ", paired with an input that provides further context"
    words = ". Write a response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n"
    assert shown(tmp_path) == [
        "<s>1+1=⟦ 2</s>⟧",
        f"<s>{task}{paired}{words}### Input:\n1 1\n\n### Response:\n⟦2</s>⟧",
        f"<s>{task}{words}### Response:\n⟦2</s>⟧",
    ]


def test_a_template_that_rewrites_earlier_turns(tmp_path, capsys):
    """One turn has a prefix; for several the line says what to do."""
    status, _, err = prepare(tmp_path, capsys, FORGETS, {"messages": CHAT}, {"messages": LONGEST})
    assert status == 2 and ": the chat template renders messages 1 to 3 in another way" in err
    assert "{% generation %}" in err and len(err.splitlines()) == err.count("\n")
    status, _, err = prepare(tmp_path, capsys, FORGETS, {"messages": CHAT})
    assert status == 0 and shown(tmp_path) == [f"{TURN}⟦<think></think>2 é<|im_end|>\n⟧"], err


WRONG = [
    ("{", "Expecting"),
    ({"text": "a"}, "it has the keys text: give messages, conversations, prompt and completion, or"),
    ({"prompt": "a </s>", "completion": "b"}, "a text spells out the special token </s>"),
    ({"messages": CHAT[:1]}, "no text of the assistant"),
]


@pytest.mark.parametrize(("line", "reason"), WRONG)
def test_a_bad_line_is_named_or_left_out(tmp_path, capsys, line, reason):
    good = {"prompt": "1+1=", "completion": "2"}
    status, out, err = prepare(tmp_path, capsys, CHATML, good, "", line, good)
    last = err.splitlines()[-1]
    assert status == 2 and not out and "row 3 of the input, " in last and reason in last
    status, _, err = prepare(tmp_path, capsys, CHATML, good, line, good, flags=["--skip-bad-documents"])
    assert status == 0 and "1 bad documents left out" in err and shown(tmp_path) == ["<s>1+1=⟦2</s>⟧"] * 2


@pytest.mark.parametrize(
    ("template", "line"),
    [("{{ raise_exception('roles must alternate') }}", "roles must alternate"), (None, "it has no chat template: ")],
)
def test_a_template_that_refuses_or_is_missing(tmp_path, capsys, template, line):
    status, _, err = prepare(tmp_path, capsys, template, {"messages": CHAT})
    assert status == 2 and line in err.splitlines()[-1]


def test_rows_are_as_lines(tmp_path, capsys):
    import datasets

    lines = [{"messages": CHAT if i % 3 else LONGEST} for i in range(40)]
    assert prepare(tmp_path, capsys, CHATML, *lines)[0] == 0
    datasets.Dataset.from_list(lines).save_to_disk(tmp_path / "rows")
    words = ["--task", "sft", "--tokenizer-model", tmp_path / "tokenizer", "--dataset", tmp_path / "rows"]
    status, _, err = call(capsys, *words, "--output-prefix", tmp_path / "rows-out")
    assert status == 0 and files_of(tmp_path / "rows-out") == files_of(tmp_path / "out"), err


# --- samples -------------------------------------------------------------------------------------------------------

PROMPTS = [[-6, -7, 7, 8], [-2, 4, -9, 5], [-3, -4, -5, -6, -7, -8, 9]]  # ids 5 6 [7 8], 1 [4] 8 [5], 2 3 4 5 6 7 [9]


def stored(prefix: Path, conversations: list[list[int]]) -> Path:
    """The files of --task sft."""
    dataset(prefix, tuple(map(len, conversations)))
    Path(f"{prefix}.bin").write_bytes(numpy.concatenate(conversations).astype("<i4").tobytes())
    return prefix


@pytest.fixture
def samples(tmp_path, monkeypatch):
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    from megatron_2bw.tasks.sft import PackedSFTDataset, SFTDataset

    monkeypatch.setattr(SFTDataset, "_key_config_attributes", staticmethod(list))

    def make(length=5, seed=7, count=None, split=Split.train, mask=True, packed=False):
        config = SimpleNamespace(sequence_length=length, random_seed=seed, create_attention_mask=mask, tokenizer=None)
        config.allow_ambiguous_pad_tokens = False
        data = IndexedDataset(str(stored(tmp_path / "data", PROMPTS)))
        kind = PackedSFTDataset if packed else SFTDataset
        return kind(data, "data", numpy.arange(len(PROMPTS)), count, split, config)

    return make


def fields(sample) -> tuple[list[int], list[int], list[float]]:
    return tuple(sample[name].tolist() for name in ("tokens", "labels", "loss_mask"))


BY_HAND = [  # of 5 tokens, with the next token as the label
    ([5, 6, 7, 8, 0], [6, 7, 8, 0, 0], [0, 1, 1, 0, 0]),
    ([1, 4, 8, 5, 0], [4, 8, 5, 0, 0], [1, 0, 1, 0, 0]),
    ([2, 3, 4, 5, 6], [3, 4, 5, 6, 7], [0, 0, 0, 0, 0]),  # cut: its target is lost
]


def test_a_sample_is_a_conversation(samples, capsys):
    data = samples()
    assert len(data) == 3
    assert sorted(map(fields, [data[i] for i in range(3)])) == sorted(BY_HAND)
    sample = data[0]
    assert sample["position_ids"].tolist() == [0, 1, 2, 3, 4] and sample["tokens"].dtype == torch.int64
    assert torch.equal(sample["attention_mask"], torch.ones(5, 5).tril()[None] < 0.5)
    assert "cuts 1 of 3 conversations for train" in capsys.readouterr().out
    whole = samples(6, mask=False)
    assert ([2, 3, 4, 5, 6, 7], [3, 4, 5, 6, 7, 9], [0, 0, 0, 0, 0, 1]) in [fields(whole[i]) for i in range(3)]
    assert "attention_mask" not in whole[0] and not whole[None]["loss_mask"].any()


def test_each_epoch_has_each_conversation_once_in_an_order_of_its_own(samples):
    data, again = samples(count=3 * 40), samples(count=7)
    order = [tuple(data[i]["tokens"].tolist()) for i in range(len(data))]
    epochs = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert all(Counter(epoch) == Counter(tuple(tokens) for tokens, _, _ in BY_HAND) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6, "all orders of three"
    assert [tuple(again[i]["tokens"].tolist()) for i in (110, 4, 5)] == [order[i] for i in (110, 4, 5)]
    other = samples(seed=8)
    assert order != [tuple(other[i]["tokens"].tolist()) for i in range(len(order))]


def test_packed_conversations_are_whole_and_by_themselves(samples):
    """Of 4, 4 and 7 tokens: in nine there is room for the first two, if no other is between them."""
    data = samples(8, count=60, packed=True)
    taken = [data[i] for i in range(60)]
    sizes = {tuple(sample["position_ids"].tolist()) for sample in taken}
    both, one, longest = (0, 1, 2, 3, 0, 1, 2, 3), (0, 1, 2, 3, 0, 1, 2, 3), (0, 1, 2, 3, 4, 5, 6, 0)
    assert sizes == {both, one, longest}
    for sample in taken:
        starts = [place for place, position in enumerate(sample["position_ids"]) if position == 0]
        seen = ~sample["attention_mask"][0]
        for place in range(8):
            first = max(start for start in starts if start <= place)
            assert seen[place].nonzero().flatten().tolist() == [*range(first, place + 1)]
        assert not any(sample["loss_mask"][start - 1] for start in starts[1:])
    found = sorted(fields(sample) for sample in taken if sample["tokens"][3] == 8 and sample["tokens"][4] == 1)
    assert found[0] == ([5, 6, 7, 8, 1, 4, 8, 5], [6, 7, 8, 1, 4, 8, 5, 0], [0, 1, 1, 0, 1, 0, 1, 0])


# --- flags ---------------------------------------------------------------------------------------------------------


def trained_on(prefix: Path, *flags: str) -> str | None:
    argv = [word for word in command(1, 2, split="100,0,0") if word != "--mock-data"]
    return complaint([*argv, "--data-path", str(prefix), *flags], 1)


def test_data_and_flag_go_together(tmp_path):
    chats, text = stored(tmp_path / "chats", PROMPTS), dataset(tmp_path / "text")
    assert trained_on(chats, "--sft-data") is None is trained_on(text)
    assert trained_on(chats).startswith(f"--data-path {chats}: it holds ")
    assert trained_on(text, "--sft-data").startswith(f"--data-path {text}: it holds ")
    assert trained_on(text, "--sft").endswith("use --sft-data --sft-packed")
    for flag in ("--eod-mask-loss", "--reset-attention-mask", "--mock-data"):
        assert trained_on(chats, "--sft-data", flag).startswith(flag)
