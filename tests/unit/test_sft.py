"""--task sft and --sft-data: which tokens are targets, what a sample holds, what is
refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from megatron_2bw.base.errors import UserError
from megatron_2bw.mcore import cpu
from megatron_2bw.run.flags import indexed_dataset
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
    "{% for m in messages %}"
    + HEADER
    + "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt "
    "%}<|im_start|>assistant\n{% endif %}"
)
CALLS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
    + HEADER
    + "{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHAT = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2 é"}]
LONGER = [
    {"role": "system", "content": "Sum."},
    *CHAT,
    {"role": "user", "content": "So"},
]
LONGEST = [
    *LONGER,
    {"role": "assistant", "content": "  OK"},
    {"role": "user", "content": "."},
]


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu():
    cpu.install()
    yield
    cpu.uninstall()


def tokenizer(folder: Path, template: str | None) -> Path:
    """A byte is a token, so that an expectation can be written as text; `<s>` precedes
    a text by itself."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        word: i
        for i, word in enumerate(
            [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
        )
    }
    core = Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer, core.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    core.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=True), begin]
    )
    special = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "additional_special_tokens": SPECIAL[2:],
    }
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, clean_up_tokenization_spaces=False, **special
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def prepare(folder: Path, capsys, template, *lines, flags=()) -> tuple[int, str, str]:
    folder.mkdir(exist_ok=True)
    data = folder / "chats.jsonl"
    data.write_text(
        "".join(
            (line if isinstance(line, str) else json.dumps(line)) + "\n"
            for line in lines
        )
    )
    words = ["--task", "sft", "--input", data, "--output-prefix", folder / "out"]
    return call(
        capsys,
        *words,
        "--tokenizer-model",
        tokenizer(folder / "tokenizer", template),
        *flags,
    )


def shown(folder: Path) -> list[str]:
    """Each conversation as text, with ⟦ ⟧ around its targets."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from transformers import AutoTokenizer

    text, found = AutoTokenizer.from_pretrained(str(folder / "tokenizer")), []
    for words in IndexedDataset(str(folder / "out")):
        edges = [0, *(numpy.flatnonzero(numpy.diff(words >= 0)) + 1), len(words)]
        parts = [words[start:end] for start, end in zip(edges, edges[1:])]
        decoded = [
            (text.decode(numpy.where(part < 0, ~part, part)), part[0] >= 0)
            for part in parts
        ]
        found.append(
            "".join(f"⟦{words}⟧" if target else words for words, target in decoded)
        )
    return found


TURN = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
FIRST = "<|im_start|>system\nSum.<|im_end|>\n"
NEXT = "<|im_start|>user\nSo<|im_end|>\n<|im_start|>assistant\n"
LAST = "<|im_start|>user\n.<|im_end|>\n"


def test_the_assistants_text_is_the_target(tmp_path, capsys):
    sharegpt = [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2 é"}]
    lines = [
        {"messages": CHAT, "id": 3},
        {"messages": LONGEST},
        {"conversations": sharegpt},
    ]
    status, out, err = prepare(tmp_path, capsys, CHATML, *lines)
    assert status == 0, err
    first = f"{TURN}⟦2 é<|im_end|>\n⟧"
    assert shown(tmp_path) == [
        first,
        f"{FIRST}{first}{NEXT}⟦  OK<|im_end|>\n⟧{LAST}",
        first,
    ]
    assert out.endswith(f" --tokenizer-model {tmp_path}/tokenizer --sft-data\n")
    assert indexed_dataset.has_prompts(str(tmp_path / "out"))


def test_the_templates_own_marks_come_first(tmp_path, capsys):
    status, _, err = prepare(tmp_path, capsys, MARKED, {"messages": LONGEST})
    assert status == 0, err
    assert shown(tmp_path) == [
        f"{FIRST}{TURN}⟦2 é<|im_end|>⟧\n{NEXT}⟦  OK<|im_end|>⟧\n{LAST}"
    ]


@pytest.mark.parametrize(
    "mask",
    [{"weight": 0}, {"loss_mask": 0}, {"loss": False}, {"train": False}],
    ids=str,
)
def test_a_masked_message_is_no_target(tmp_path, capsys, mask):
    """Whatever the template marks; another message's 1 is the default, and an unknown
    key changes nothing."""
    chat = [
        *LONGER[:2],
        {**LONGER[2], **mask, "id": 7},
        LONGER[3],
        {**LONGEST[4], **dict.fromkeys(mask, 1)},
        LONGEST[5],
    ]
    for template, end in ((CHATML, "<|im_end|>\n⟧"), (MARKED, "<|im_end|>⟧\n")):
        status, _, err = prepare(
            tmp_path / end[-1], capsys, template, {"messages": chat}
        )
        assert status == 0, err
        assert shown(tmp_path / end[-1]) == [
            f"{FIRST}{TURN}2 é<|im_end|>\n{NEXT}⟦  OK{end}{LAST}"
        ]


def test_system_prompts_and_content_in_parts(tmp_path, capsys):
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": text} for text in ("1+", "1?")],
        },
        CHAT[1],
    ]
    sharegpt = [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2 é"}]
    system = {"system": "Sum."}
    lines = [
        {"messages": parts, **system},
        {"conversations": sharegpt, **system},
        {"messages": LONGER[:3], **system},
    ]
    status, _, err = prepare(tmp_path, capsys, CHATML, *lines)
    assert status == 0 and shown(tmp_path) == [f"{FIRST}{TURN}⟦2 é<|im_end|>\n⟧"] * 3, (
        err
    )


def test_calls_of_functions(tmp_path, capsys):
    """The forms of OpenAI, now and before, and of LLaMA-Factory; the arguments are JSON
    in JSON."""
    call, tool = (
        {"name": "add", "arguments": '{"a": 1}'},
        {"name": "add", "parameters": {}},
    )
    wrapped, parsed = (
        {"type": "function", "function": tool},
        {**call, "arguments": {"a": 1}},
    )
    said = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": call}],
    }
    now = [
        CHAT[0],
        said,
        {"role": "tool", "tool_call_id": "c", "content": "2"},
        CHAT[1],
    ]
    before = [
        CHAT[0],
        {"role": "assistant", "function_call": call},
        {"role": "function", "content": "2"},
        CHAT[1],
    ]
    values = {
        "human": "1+1?",
        "function_call": json.dumps(parsed),
        "observation": "2",
        "gpt": "2 é",
    }
    sharegpt = [{"from": role, "value": value} for role, value in values.items()]
    lines = [
        {"messages": now, "tools": [wrapped]},
        {"messages": before, "functions": [tool]},
    ]
    lines += [{"conversations": sharegpt, "tools": json.dumps([tool])}]
    status, _, err = prepare(tmp_path, capsys, CALLS, *lines)
    answer = "<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n⟦2 é<|im_end|>\n⟧"
    expected = f"{json.dumps(wrapped)}{TURN}⟦{json.dumps(parsed)}<|im_end|>\n⟧{answer}"
    assert status == 0 and shown(tmp_path) == [expected] * 3, err


def test_plain_forms(tmp_path, capsys):
    alpaca = {"instruction": "Add.", "input": "1 1", "output": "2"}
    more = {**alpaca, "input": "", "system": "Sum.", "history": [["Say 1.", "1"]]}
    lines = [
        {"prompt": "1+1=", "completion": " 2"},
        alpaca,
        {**alpaca, "input": ""},
        more,
    ]
    status, _, err = prepare(tmp_path, capsys, None, *lines)
    assert status == 0, err
    task = "Below is an instruction that describes a task"
    paired = ", paired with an input that provides further context"
    words = (
        ". Write a response that appropriately completes the request.\n\n### "
        "Instruction:\nAdd.\n\n"
    )
    assert shown(tmp_path) == [
        "<s>1+1=⟦ 2</s>⟧",
        f"<s>{task}{paired}{words}### Input:\n1 1\n\n### Response:\n⟦2</s>⟧",
        f"<s>{task}{words}### Response:\n⟦2</s>⟧",
        "<s>Sum.\n\n### Instruction:\nSay 1.\n\n### Response:\n⟦1</s>⟧"
        "\n\n### Instruction:\nAdd.\n\n### Response:\n⟦2</s>⟧",
    ]


def test_a_template_that_rewrites_earlier_turns(tmp_path, capsys):
    """One turn has a prefix; for several the line says what to do."""
    status, _, err = prepare(
        tmp_path, capsys, FORGETS, {"messages": CHAT}, {"messages": LONGEST}
    )
    assert (
        status == 2
        and ": the chat template renders messages 1 to 3 in another way" in err
    )
    assert "{% generation %}" in err and len(err.splitlines()) == err.count("\n")
    status, _, err = prepare(tmp_path, capsys, FORGETS, {"messages": CHAT})
    assert status == 0 and shown(tmp_path) == [
        f"{TURN}⟦<think></think>2 é<|im_end|>\n⟧"
    ], err


WRONG = [
    ("{", "it is no JSON, Expecting"),
    ("[1]", "it is list, not an object"),
    (
        {"text": "a"},
        "it has the keys text: give messages, conversations, prompt and completion, or",
    ),
    (
        {"prompt": "a </s>", "completion": "b"},
        "a text spells out the special token </s>",
    ),
    ({"messages": CHAT[:1]}, "no text of the assistant"),
    ({"messages": [{**CHAT[1], "weight": 0}]}, "no text of the assistant"),
    ({"messages": [{**CHAT[1], "weight": 0.5}]}, "messages[0].weight is 0.5: give 0 "),
    (
        {"messages": ["a"]},
        "messages[0] is str: give role and content, or from and value",
    ),
    (
        {"messages": [{"content": "a"}]},
        "messages[0] has the keys content: give role and content, or from",
    ),
    ({"messages": [{"role": "assistant"}]}, "messages[0] has NoneType as its content"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]},
        "messages[0]: a call of a function must",
    ),
    (
        {
            "messages": [
                *CHAT,
                {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]},
            ]
        },
        "the call of f",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, CHAT[1]]},
        "messages[0].content has a part of the ",
    ),
    (
        {"messages": CHAT, "tools": [{"name": "f"}]},
        "the chat template does not show tools",
    ),
    (
        {"messages": LONGER[:3], "system": "S"},
        "system and messages[0] are different system prompts",
    ),
    (
        {"conversations": [{"from": "bot", "value": "a"}]},
        "conversations[0].from is bot: give human, gpt, ",
    ),
    (
        {"prompt": "a", "completion": "b", "system": "S"},
        "system has no effect on this form",
    ),
    (
        {"instruction": "a", "output": "b", "history": ["q"]},
        "history must be a list of pairs",
    ),
    ({"instruction": "a", "output": 2}, "output is int, not a string"),
    (
        {"messages": [{"role": "user", "content": "\ud800"}, CHAT[1]]},
        "surrogates not allowed",
    ),
    ({"prompt": "\ud800", "completion": "b"}, "surrogates not allowed"),
]


@pytest.mark.parametrize(("line", "reason"), WRONG)
def test_a_bad_line_is_named_or_left_out(tmp_path, capsys, line, reason):
    good = {"prompt": "1+1=", "completion": "2"}
    status, out, err = prepare(tmp_path, capsys, CHATML, good, "", line, good)
    last = err.splitlines()[-1]
    assert status == 2 and not out and "chats.jsonl, row 3, " in last and reason in last
    status, _, err = prepare(
        tmp_path, capsys, CHATML, good, line, good, flags=["--skip-bad-documents"]
    )
    assert (
        status == 0
        and "1 bad documents left out" in err
        and shown(tmp_path) == ["<s>1+1=⟦2</s>⟧"] * 2
    )


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        (None, "it has no chat template: "),
    ],
)
def test_a_template_that_refuses_or_is_missing(tmp_path, capsys, template, line):
    status, _, err = prepare(tmp_path, capsys, template, {"messages": CHAT})
    assert status == 2 and line in err.splitlines()[-1]


def test_rows_are_as_lines(tmp_path, capsys):
    import datasets

    lines = [{"messages": CHAT if i % 3 else LONGEST} for i in range(40)]
    assert prepare(tmp_path, capsys, CHATML, *lines)[0] == 0
    datasets.Dataset.from_list(lines).save_to_disk(tmp_path / "rows")
    words = [
        "--task",
        "sft",
        "--tokenizer-model",
        tmp_path / "tokenizer",
        "--dataset",
        tmp_path / "rows",
    ]
    status, _, err = call(capsys, *words, "--output-prefix", tmp_path / "rows-out")
    assert status == 0 and files_of(tmp_path / "rows-out") == files_of(
        tmp_path / "out"
    ), err


# --- samples
# --------------------------------------------------------------------------------------

# ids 5 6 [7 8], 1 [4] 8 [5], 2 3 4 5 6 7 [9]
PROMPTS = [[-6, -7, 7, 8], [-2, 4, -9, 5], [-3, -4, -5, -6, -7, -8, 9]]


def stored(prefix: Path, conversations: list[list[int]]) -> Path:
    """The files of --task sft."""
    dataset(prefix, tuple(map(len, conversations)))
    Path(f"{prefix}.bin").write_bytes(
        numpy.concatenate(conversations).astype("<i4").tobytes()
    )
    return prefix


@pytest.fixture
def samples(tmp_path, monkeypatch):
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    from megatron_2bw.run.tasks.sft import PackedSFTDataset, SFTDataset

    monkeypatch.setattr(SFTDataset, "_key_config_attributes", staticmethod(list))

    def make(
        length=5,
        seed=7,
        count=None,
        split=Split.train,
        mask=True,
        packed=False,
        prompts=PROMPTS,
    ):
        config = SimpleNamespace(
            sequence_length=length,
            random_seed=seed,
            create_attention_mask=mask,
            tokenizer=None,
        )
        config.allow_ambiguous_pad_tokens = False
        data = IndexedDataset(str(stored(tmp_path / "data", prompts)))
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
    assert len(data) == len(samples(count=0)) == 3
    assert sorted(map(fields, [data[i] for i in range(3)])) == sorted(BY_HAND)
    sample = data[0]
    assert (
        sample["position_ids"].tolist() == [0, 1, 2, 3, 4]
        and sample["tokens"].dtype == torch.int64
    )
    assert torch.equal(sample["attention_mask"], torch.ones(5, 5).tril()[None] < 0.5)
    assert (
        "cuts 1 of 3 conversations for train of data; 1 have no target left"
        in capsys.readouterr().out
    )
    for packed in (False, True):
        with pytest.raises(
            UserError, match="cuts 3 of 3 .* 3 have no target left: give a longer one"
        ):
            samples(1, prompts=[[-6, -7, 7], [-2, -9, 5], [-3, -4, 9]], packed=packed)
    whole = samples(6, mask=False)
    assert ([2, 3, 4, 5, 6, 7], [3, 4, 5, 6, 7, 9], [0, 0, 0, 0, 0, 1]) in [
        fields(whole[i]) for i in range(3)
    ]
    assert "attention_mask" not in whole[0] and not whole[None]["loss_mask"].any()


def test_each_epoch_has_each_conversation_once_in_an_order_of_its_own(samples):
    data, again = samples(count=3 * 40), samples(count=7)
    order = [tuple(data[i]["tokens"].tolist()) for i in range(len(data))]
    epochs = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert all(
        Counter(epoch) == Counter(tuple(tokens) for tokens, _, _ in BY_HAND)
        for epoch in epochs
    )
    assert len({tuple(epoch) for epoch in epochs}) == 6, "all orders of three"
    assert [tuple(again[i]["tokens"].tolist()) for i in (110, 4, 5)] == [
        order[i] for i in (110, 4, 5)
    ]
    other = samples(seed=8)
    assert order != [tuple(other[i]["tokens"].tolist()) for i in range(len(order))]


def test_packed_conversations_are_whole_and_by_themselves(samples):
    """Of 4, 4 and 7 tokens: in nine there is room for the first two, if no other is
    between them."""
    data = samples(8, count=60, packed=True)
    taken = [data[i] for i in range(60)]
    sizes = {tuple(sample["position_ids"].tolist()) for sample in taken}
    both, one, longest = (
        (0, 1, 2, 3, 0, 1, 2, 3),
        (0, 1, 2, 3, 0, 1, 2, 3),
        (0, 1, 2, 3, 4, 5, 6, 0),
    )
    assert sizes == {both, one, longest}
    for sample in taken:
        starts = [
            place
            for place, position in enumerate(sample["position_ids"])
            if position == 0
        ]
        seen = ~sample["attention_mask"][0]
        for place in range(8):
            first = max(start for start in starts if start <= place)
            assert seen[place].nonzero().flatten().tolist() == [
                *range(first, place + 1)
            ]
        assert not any(sample["loss_mask"][start - 1] for start in starts[1:])
    found = sorted(
        fields(sample)
        for sample in taken
        if sample["tokens"][3] == 8 and sample["tokens"][4] == 1
    )
    assert found[0] == (
        [5, 6, 7, 8, 1, 4, 8, 5],
        [6, 7, 8, 1, 4, 8, 5, 0],
        [0, 1, 1, 0, 1, 0, 1, 0],
    )


# --- flags
# --------------------------------------------------------------------------------------


def trained_on(prefix: Path, *flags: str) -> str | None:
    argv = [word for word in command(1, 2, split="100,0,0") if word != "--mock-data"]
    return complaint([*argv, "--data-path", str(prefix), *flags], 1)


def test_data_and_flag_go_together(tmp_path):
    chats, text = stored(tmp_path / "chats", PROMPTS), dataset(tmp_path / "text")
    assert trained_on(chats, "--sft-data") is None is trained_on(text)
    late = stored(tmp_path / "late", [[-1] * 17 + [5]] * 2)
    assert trained_on(late, "--sft-data").startswith(
        "--seq-length 16: all targets of --data-path "
    )
    assert (
        trained_on(
            stored(tmp_path / "last", [[-1] * 17 + [5], [-1] * 16 + [5, 6]]),
            "--sft-data",
        )
        is None
    )
    assert trained_on(chats).startswith(f"--data-path {chats}: it holds ")
    assert trained_on(text, "--sft-data").startswith(f"--data-path {text}: it holds ")
    assert trained_on(text, "--sft").endswith("use --sft-data --sft-packed")
    for flag in ("--eod-mask-loss", "--reset-attention-mask", "--mock-data"):
        assert trained_on(chats, "--sft-data", flag).startswith(flag)
