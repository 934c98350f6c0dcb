"""--task sft and --sft-data: which tokens are targets, what a sample holds, what is
refused."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from megatron_2bw.base.errors import UserError
from megatron_2bw.base.files import read_yaml
from megatron_2bw.run.flags import indexed_dataset
from tests.distributed.training import command
from tests.unit.command_lines import complaint, dataset
from tests.unit.test_preprocess import call, done, files_of

pytestmark = pytest.mark.usefixtures("on_the_cpu")

CHATML = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
)
THOUGHT = "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
# as Qwen3: what it thought is shown in the last answer only
FORGETS = CHATML.replace("{{ m.content", THOUGHT + "{{ m.content")
CALL = "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
CALLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
CALLS += CHATML.replace("<|im_end|>", CALL + "<|im_end|>")
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


BY_HAND = read_yaml(Path(__file__).with_name("sft.yaml"))
CHAT = BY_HAND["chat"]
LONGEST = BY_HAND["longest"]
PROMPTS = BY_HAND["prompts"]


def tokenizer(folder: Path, template: str | None) -> Path:
    """A byte is a token, so that an expectation can be written as text; `<s>` precedes
    a text by itself."""
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    core.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=True), begin]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core,
        clean_up_tokenization_spaces=False,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=SPECIAL[2:],
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def prepare(tmp_path, capsys):
    """Run the command on lines: its status, stdout, and stderr."""

    def run(template, *lines, flags: str = "") -> tuple[int, str, str]:
        data = tmp_path / "chats.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        data.write_text("\n".join(texts))
        folder = tokenizer(tmp_path / "tokenizer", template)
        words = f"--task sft --input {data} --output-prefix {tmp_path}/out"
        return call(capsys, f"{words} --tokenizer-model {folder} {flags}")

    return run


@pytest.fixture
def shown(prepare, tmp_path):
    """Each conversation of good lines as text, with ⟦ ⟧ around its targets."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from transformers import AutoTokenizer

    def show(template, *lines, flags: str = "") -> list[str]:
        status, _, err = prepare(template, *lines, flags=flags)
        assert status == 0, err
        assert "--skip-bad-documents" not in flags or "1 bad documents left out" in err
        fast = AutoTokenizer.from_pretrained(str(tmp_path / "tokenizer"))
        conversations = []
        for words in IndexedDataset(str(tmp_path / "out")):
            edges = numpy.flatnonzero(numpy.diff(words >= 0)) + 1
            text = ""
            for part in numpy.split(words, edges):
                target = part[0] >= 0
                decoded = fast.decode(part if target else ~part)
                text += f"⟦{decoded}⟧" if target else decoded
            conversations.append(text)
        for result in ("out.bin", "out.idx"):
            (tmp_path / result).rename(tmp_path / f"last-{result}")
        return conversations

    return show


TURN = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
FIRST = "<|im_start|>system\nSum.<|im_end|>\n"
NEXT = "<|im_start|>user\nSo<|im_end|>\n<|im_start|>assistant\n"
LAST = "<|im_start|>user\n.<|im_end|>\n"


def test_the_assistants_text_is_the_target(shown, tmp_path):
    first = f"{TURN}⟦2 é<|im_end|>\n⟧"
    whole = f"{FIRST}{first}{NEXT}⟦  OK<|im_end|>\n⟧{LAST}"
    lines = [
        {"messages": CHAT, "id": 3},
        {"messages": LONGEST},
        {"conversations": BY_HAND["sharegpt"]},
    ]
    assert shown(CHATML, *lines) == [first, whole, first]
    assert indexed_dataset.has_prompts(str(tmp_path / "last-out"))


def test_the_templates_own_marks_come_first(shown):
    answers = f"{TURN}⟦2 é<|im_end|>⟧\n{NEXT}⟦  OK<|im_end|>⟧\n"
    assert shown(MARKED, {"messages": LONGEST}) == [f"{FIRST}{answers}{LAST}"]


@pytest.mark.parametrize("mask", [{"weight": 0}, {"loss_mask": 0}, {"train": False}])
@pytest.mark.parametrize(
    ("template", "end"), [(CHATML, "<|im_end|>\n⟧"), (MARKED, "<|im_end|>⟧\n")]
)
def test_a_masked_message_is_no_target(shown, mask, template, end):
    """Whatever the template marks; an unknown key changes nothing."""
    chat = list(LONGEST)
    chat[2] = chat[2] | mask | {"id": 7}
    expected = f"{FIRST}{TURN}2 é<|im_end|>\n{NEXT}⟦  OK{end}{LAST}"
    assert shown(template, {"messages": chat}) == [expected]


SYSTEM = """
{"system": "Sum.", "messages": [{"role": "user", "content": [{"type": "text", "text": "1+"}, {"text": "1?"}]}, \
{"role": "assistant", "content": "2 é"}]}
{"system": "Sum.", "conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2 é"}]}
{"system": "Sum.", "messages": [{"role": "system", "content": "Sum."}, {"role": "user", "content": "1+1?"}, \
{"role": "assistant", "content": "2 é"}]}
"""


def test_system_prompts_and_content_in_parts(shown):
    expected = f"{FIRST}{TURN}⟦2 é<|im_end|>\n⟧"
    assert shown(CHATML, *SYSTEM.split("\n")) == [expected] * 3


# The arguments of a call are JSON in JSON.
CALLED = r"""
{"tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}], "messages": [\
{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": null, "tool_calls": [\
{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{\"a\": 1}"}}]}, \
{"role": "tool", "tool_call_id": "c", "content": "2"}, {"role": "assistant", "content": "2 é"}]}
{"functions": [{"name": "add", "parameters": {}}], "messages": [\
{"role": "user", "content": "1+1?"}, \
{"role": "assistant", "function_call": {"name": "add", "arguments": "{\"a\": 1}"}}, \
{"role": "function", "content": "2"}, {"role": "assistant", "content": "2 é"}]}
{"tools": "[{\"name\": \"add\", \"parameters\": {}}]", "conversations": [\
{"from": "human", "value": "1+1?"}, \
{"from": "function_call", "value": "{\"name\": \"add\", \"arguments\": {\"a\": 1}}"}, \
{"from": "observation", "value": "2"}, {"from": "gpt", "value": "2 é"}]}
""".replace("\\\n", "")


def test_calls_of_functions(shown):
    """The forms of OpenAI, now and before, and of LLaMA-Factory."""
    tool = '{"type": "function", "function": {"name": "add", "parameters": {}}}'
    call = '⟦{"name": "add", "arguments": {"a": 1}}<|im_end|>\n⟧'
    answer = "<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n⟦2 é<|im_end|>\n⟧"
    expected = tool + TURN + call + answer
    assert shown(CALLS, *CALLED.split("\n")) == [expected] * 3


PLAIN = """
{"prompt": "1+1=", "completion": " 2"}
{"instruction": "Add.", "input": "1 1", "output": "2"}
{"instruction": "Add.", "input": "", "output": "2"}
{"instruction": "Add.", "output": "2", "system": "Sum.", "history": [["Say 1.", "1"]]}
"""


def test_plain_forms(shown):
    task = "<s>Below is an instruction that describes a task"
    paired = ", paired with an input that provides further context"
    words = (
        ". Write a response that appropriately completes the request.\n\n### "
        "Instruction:\nAdd.\n\n"
    )
    assert shown(None, *PLAIN.split("\n")) == [
        "<s>1+1=⟦ 2</s>⟧",
        f"{task}{paired}{words}### Input:\n1 1\n\n### Response:\n⟦2</s>⟧",
        f"{task}{words}### Response:\n⟦2</s>⟧",
        "<s>Sum.\n\n### Instruction:\nSay 1.\n\n### Response:\n⟦1</s>⟧"
        "\n\n### Instruction:\nAdd.\n\n### Response:\n⟦2</s>⟧",
    ]


def test_a_template_that_rewrites_earlier_turns(prepare, shown):
    """One turn has a prefix; for several the line says what to do."""
    status, _, err = prepare(FORGETS, {"messages": CHAT}, {"messages": LONGEST})
    assert status == 2 and "messages 1 to 3" in err and "{% generation %}" in err
    answer = f"{TURN}⟦<think></think>2 é<|im_end|>\n⟧"
    assert shown(FORGETS, {"messages": CHAT}) == [answer]


# A bad line, and after # the reason. ANSWER: a message of the assistant.
ANSWER = '{"role": "assistant", "content": "b"}'
WRONG = r"""
{ # it is no JSON, Expecting
{"text": "a"} # it has the keys text: give messages, conversations, prompt and completion, or
{"prompt": "a </s>", "completion": "b"} # a text spells out the special token </s>
{"prompt": "a", "completion": "b", "system": "S"} # system has no effect on this form
{"instruction": "a", "output": "b", "history": ["q"]} # not two strings
{"conversations": [{"from": "bot", "value": "a"}]} # conversations[0]: from is bot: give human, gpt,
{"messages": [{"content": "a"}]} # messages[0]: it has no role: give role and content, or from and value
{"messages": [{"role": "user", "content": "a"}]} # no text of the assistant
{"messages": [{"role": "assistant", "content": "b", "weight": 0.5}]} # messages[0]: weight is 0.5: give 0
{"messages": [{"role": "assistant"}]} # messages[0]: it has NoneType as its content
{"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]} # messages[0]: KeyError('arguments')
{"messages": [ANSWER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}]} # the call of f
{"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]} # messages[0]: KeyError('text')
{"messages": [ANSWER], "tools": [{"name": "f"}]} # the chat template does not show tools
{"messages": [{"role": "system", "content": "a"}, ANSWER], "system": "S"} # different system prompts
"""
WRONG = [line.split(" # ") for line in WRONG.strip().split("\n")]


@pytest.mark.parametrize(("line", "reason"), WRONG)
def test_a_bad_line_is_named_or_left_out(prepare, shown, line, reason):
    good = {"prompt": "1+1=", "completion": "2"}
    line = line.replace("ANSWER", ANSWER)
    status, out, err = prepare(CHATML, good, "", line, good)
    last = err.splitlines()[-1]
    assert status == 2 and not out and "chats.jsonl, row 3, " in last and reason in last
    shown_lines = shown(CHATML, good, line, good, flags="--skip-bad-documents")
    assert shown_lines == ["<s>1+1=⟦2</s>⟧"] * 2


def test_without_a_template_there_is_no_chat(prepare):
    status, _, err = prepare(None, {"messages": CHAT})
    assert status == 2
    assert "it has no chat template: " in err.splitlines()[-1]


def test_rows_are_as_lines(tmp_path, capsys, prepare):
    import datasets

    lines = [{"messages": CHAT if i % 3 else LONGEST} for i in range(40)]
    status, out, _ = prepare(CHATML, *lines)
    assert status == 0
    assert out.endswith(f" --tokenizer-model {tmp_path}/tokenizer --sft-data\n")
    datasets.Dataset.from_list(lines).save_to_disk(tmp_path / "rows")
    words = f"--task sft --tokenizer-model {tmp_path}/tokenizer"
    words += f" --dataset {tmp_path}/rows --output-prefix {tmp_path}/rows-out"
    done(capsys, words)
    assert files_of(tmp_path / "rows-out") == files_of(tmp_path / "out")


# --- samples
# --------------------------------------------------------------------------------------


def stored(prefix: Path, conversations: list[list[int]]) -> Path:
    """The files of --task sft."""
    dataset(prefix, tuple(map(len, conversations)))
    words = numpy.concatenate(conversations).astype("<i4")
    Path(f"{prefix}.bin").write_bytes(words.tobytes())
    return prefix


@pytest.fixture
def samples(tmp_path, monkeypatch):
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    from megatron_2bw.run.tasks.sft import PackedSFTDataset, SFTDataset

    monkeypatch.setattr(SFTDataset, "_key_config_attributes", staticmethod(list))

    def make(length=5, seed=7, count=None, mask=True, packed=False, prompts=PROMPTS):
        config = SimpleNamespace(
            sequence_length=length,
            random_seed=seed,
            create_attention_mask=mask,
            tokenizer=None,
            allow_ambiguous_pad_tokens=False,
        )
        data = IndexedDataset(str(stored(tmp_path / "data", prompts)))
        kind = PackedSFTDataset if packed else SFTDataset
        return kind(data, "data", numpy.arange(3), count, Split.train, config)

    return make


def all_of(data) -> list[dict]:
    return [data[number] for number in range(len(data))]


def fields(sample) -> list[list[int]]:
    return [sample[name].tolist() for name in ("tokens", "labels", "loss_mask")]


def test_a_sample_is_a_conversation(samples, capsys):
    data = samples()
    assert len(data) == len(samples(count=0)) == 3
    assert sorted(map(fields, all_of(data))) == BY_HAND["samples of 5 tokens"]
    sample = data[0]
    assert sample["position_ids"].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(sample["attention_mask"], torch.ones(5, 5).tril()[None] < 0.5)
    line = "cuts 1 of 3 conversations for train of data; 1 have no target left"
    assert line in capsys.readouterr().out
    whole = samples(6, mask=False)
    assert BY_HAND["longest of 6 tokens"] in map(fields, all_of(whole))
    assert "attention_mask" not in whole[0]
    assert not whole[None]["loss_mask"].any()


@pytest.mark.parametrize("packed", [False, True])
def test_a_length_that_leaves_no_target(samples, packed):
    late = BY_HAND["only late targets"]
    with pytest.raises(UserError, match="cuts 3 of 3 .* 3 have no target left: give "):
        samples(1, prompts=late, packed=packed)


def order_of(data) -> list[tuple[int, ...]]:
    return [tuple(sample["tokens"].tolist()) for sample in all_of(data)]


def test_each_epoch_has_each_conversation_once_in_an_order_of_its_own(samples):
    order = order_of(samples(count=3 * 40))
    epochs = set(itertools.batched(order, 3))
    expected = [tuple(tokens) for tokens, _, _ in BY_HAND["samples of 5 tokens"]]
    assert epochs == set(itertools.permutations(expected))
    fewer = samples(count=7)  # a sample depends on its number alone
    assert tuple(fewer[110]["tokens"].tolist()) == order[110]
    assert order != order_of(samples(seed=8, count=3 * 40))


def test_packed_conversations_are_whole_and_by_themselves(samples):
    """They have 4, 4 and 7 tokens. In nine there is room for the first two, if no other
    is between them."""
    both = []
    sizes = set()
    for sample in all_of(samples(8, count=60, packed=True)):
        positions = sample["position_ids"]
        sizes.add(tuple(positions.tolist()))
        seen = ~sample["attention_mask"][0]
        for place, position in enumerate(positions.tolist()):
            expected = list(range(place - position, place + 1))
            assert seen[place].nonzero().flatten().tolist() == expected
            if place and not position:
                assert not sample["loss_mask"][place - 1]
        if sample["tokens"][3:5].tolist() == [8, 1]:
            both.append(fields(sample))
    assert sizes == set(map(tuple, BY_HAND["packed positions"]))
    assert min(both) == BY_HAND["packed"]


# --- flags
# --------------------------------------------------------------------------------------


def trained_on(prefix: Path, *flags: str) -> str | None:
    argv = command(1, 2, split="100,0,0")
    argv.remove("--mock-data")
    return complaint([*argv, "--data-path", str(prefix), *flags], 1)


def test_data_and_flag_go_together(tmp_path):
    chats = stored(tmp_path / "chats", PROMPTS)
    text = dataset(tmp_path / "text")
    assert trained_on(chats, "--sft-data") is None
    assert trained_on(text) is None
    assert trained_on(chats).startswith(f"--data-path {chats}: it holds ")
    assert trained_on(text, "--sft-data").startswith(f"--data-path {text}: it holds ")
    assert trained_on(text, "--sft").endswith("use --sft-data --sft-packed")
    flag = "--reset-attention-mask"
    assert trained_on(chats, "--sft-data", flag).startswith(flag)


def test_a_length_that_cuts_all_targets_is_refused(tmp_path):
    lost = [-1] * 17 + [5]
    late = stored(tmp_path / "late", [lost, lost])
    line = "--seq-length 16: all targets of --data-path "
    assert trained_on(late, "--sft-data").startswith(line)
    last = stored(tmp_path / "last", [lost, [-1] * 16 + [5, 6]])
    assert trained_on(last, "--sft-data") is None
