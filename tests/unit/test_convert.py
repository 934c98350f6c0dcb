"""Importing and exporting: padding, what config.json asks for, and one line for each
wrong input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from megatron_2bw.base.errors import UserError
from megatron_2bw.tools.convert import (
    config,
    convert_command,
    hugging_face_folder,
    work,
)
from megatron_2bw.tools.convert.families import (
    FAMILIES,
    PADDING_BIAS,
    to_hugging_face,
    to_megatron,
)
from megatron_2bw.tools.planner.descriptions.model import Model

SIZES = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 12,
    "vocab_size": 10,
}
SIZES["max_position_embeddings"] = 16
LLAMA = SIZES | {
    "model_type": "llama",
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 1,
    "n_embd": 8,
    "n_head": 2,
    "n_positions": 16,
    "vocab_size": 10,
}
OTHERS = dict(
    logits_scaling=8.0,
    embedding_multiplier=12.0,
    residual_multiplier=0.2,
    final_logit_softcapping=30.0,
)
OTHERS |= dict(layer_types=["sliding_attention"], query_pre_attn_scalar=2)
MODEL = Model("llama", 1, 8, 4, vocab=10, groups=2, ffn=12)


# --- rows
# --------------------------------------------------------------------------------------


def test_padding_rows_are_added_and_cut():
    words, bias = torch.arange(10.0)[:, None].expand(-1, 8), torch.arange(10.0)
    for kind, name, tensor in (
        ("llama", "output_layer.weight", words),
        ("megatron-bert", "output_layer.bias", bias),
    ):
        whole = to_megatron(FAMILIES[kind], name, [tensor], MODEL, rows=16)
        assert len(whole) == 16 and torch.equal(
            to_hugging_face(FAMILIES[kind], name, whole, MODEL)[0], tensor
        )
        assert (whole[10:] == (PADDING_BIAS if "bias" in name else 9)).all()


# --- config.json
# --------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Writes a folder: its configuration, and tensors of the shapes that it asks
    for."""

    def write(content: dict, tensors: dict[str, torch.Tensor] | None = None) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(content))
        save_file(
            llama_tensors() if tensors is None else tensors,
            tmp_path / "model.safetensors",
        )
        return tmp_path

    return write


def llama_tensors() -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    return {
        name: torch.ones(tensor.shape) for name, tensor in model.state_dict().items()
    }


def test_flags_of_a_gpt2_with_shorter_samples(folder):
    path = folder(GPT2 | {"resid_pdrop": 0.2, "attn_pdrop": 0.1}) / "config.json"
    flags = " ".join(config.read(path, 8).flags)
    assert (
        "--seq-length 8 --max-position-embeddings 16" in flags
        and "--openai-gelu" in flags
    )
    assert "--hidden-dropout 0.2" in flags and "--attention-dropout" not in flags
    with pytest.raises(
        UserError, match="--seq-length 17: the model has only 16 positions"
    ):
        config.read(path, 17)


def test_a_long_model_has_samples_of_4096_tokens(folder):
    # as on the Hub
    more = {
        "is_llama_config": True,
        "pruned_heads": {},
        "position_embedding_type": "absolute",
    }
    path = folder(LLAMA | more | {"max_position_embeddings": 131072}) / "config.json"
    assert "--seq-length 4096" in " ".join(config.read(path, None).flags)
    assert "--seq-length 8192" in " ".join(config.read(path, 8192).flags)


@pytest.mark.parametrize(
    "content, line",
    [
        (
            LLAMA | {"model_type": "bloom"},
            "model_type 'bloom' is not supported; those that are: llama, ",
        ),
        (
            LLAMA | {"architectures": ["LlamaForSequenceClassification"]},
            "'architectures' is LlamaForSequence",
        ),
        (
            LLAMA
            | {"model_type": "mistral", "architectures": None, "sliding_window": 8},
            "sliding_window",
        ),
        *(
            (LLAMA | {name: value}, f"the entry {name!r} is {value!r}")
            for name, value in OTHERS.items()
        ),
    ],
)
def test_what_megatron_cannot_represent(content, line, folder):
    with pytest.raises(UserError) as error:
        config.read(folder(content) / "config.json", None)
    assert (
        line in str(error.value)
        and "config.json" in str(error.value)
        and "\n" not in str(error.value)
    )


# --- the tensors
# --------------------------------------------------------------------------------------


def complaint(path: Path) -> str | None:
    """The line about the tensors of a folder of LLAMA, or None."""
    try:
        work._files(
            config.read(path / "config.json", None),
            hugging_face_folder.Weights(path).shapes,
        )
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return None


def test_whole_folders_with_and_without_a_prefix(folder):
    held = llama_tensors()
    bare = {name.removeprefix("model."): tensor for name, tensor in held.items()}
    for tensors in (
        held,
        bare,
        held | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1)},
    ):
        assert complaint(folder(LLAMA, tensors)) is None


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    "change, line",
    [
        (
            {NORM: None},
            f"the tensor {NORM} is missing; config.json's LlamaForCausalLM has it as (8,)",
        ),
        (
            {NORM: torch.ones(9)},
            f"the tensor {NORM} is (9,); config.json's LlamaForCausalLM has it as (8,)",
        ),
        (
            {NORM: torch.ones(8, dtype=torch.int8)},
            f"the tensor {NORM} is of type I8: only F32",
        ),
        (
            {"model.layers.0.self_attn.q_proj.bias": torch.ones(8)},
            "q_proj.bias is (8,); config.json's",
        ),
    ],
)
def test_tensors_that_do_not_fit(change, line, folder):
    held = {
        name: tensor
        for name, tensor in (llama_tensors() | change).items()
        if tensor is not None
    }
    assert line in complaint(folder(LLAMA, held))


def test_files_that_are_missing_or_cut_short(folder):
    path = folder(LLAMA)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "cut short or no file of safetensors" in complaint(path)
    file.unlink()
    assert f"there is neither {hugging_face_folder.INDEX} nor" in complaint(path)
    weight_map = {NORM: "model-00002-of-00002.safetensors"}
    (path / hugging_face_folder.INDEX).write_text(
        json.dumps({"weight_map": weight_map})
    )
    assert "model-00002-of-00002.safetensors: it is missing" in complaint(path)
    save_file({"other": torch.ones(1)}, path / weight_map[NORM])
    assert NORM in complaint(path)


def test_large_models_have_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(hugging_face_folder, "SHARD", 100)
    held = {f"t{number}": torch.full((number,), 1.0) for number in (10, 20, 1, 40)}
    hugging_face_folder.write(tmp_path, held.items())
    weights = hugging_face_folder.Weights(tmp_path)
    assert set(weights.shapes) == set(held) and all(
        torch.equal(weights.read(name), held[name]) for name in held
    )
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    assert set(load_file(tmp_path / files[1])) == {"t20", "t1"}
    index = tmp_path / hugging_face_folder.INDEX
    index.write_text(index.read_text().replace('"t1"', '"t20"'))
    # a file's tensors that the index leaves out, too
    assert set(hugging_face_folder.Weights(tmp_path).shapes) == set(held)
    save_file({"t1": held["t1"]}, tmp_path / hugging_face_folder.SINGLE)
    # transformers reads the one file then
    assert set(hugging_face_folder.Weights(tmp_path).shapes) == {"t1"}


# --- the command line and the tokenizer
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, line",
    [
        ("import no/such --save x", "no/such: there is no such folder"),
        ("import . --save x --seq-length -1", "argument --seq-length: -1: must be"),
        ("import {} --save {}", "it holds a checkpoint already: give another folder"),
        ("export . --out .", "--out .: it exists already"),
    ],
)
def test_wrong_words(words, line, folder, capsys):
    path = folder(LLAMA)
    (path / "latest_checkpointed_iteration.txt").write_text("release")
    with pytest.raises(SystemExit) as end:
        convert_command.main(
            words.replace("{}", str(path)).split(), "megatron-2bw convert"
        )
    assert end.value.code == 2 and line in capsys.readouterr().err.splitlines()[-1]


def test_a_tokenizer_of_another_model(folder):
    path = folder(LLAMA)
    words = Tokenizer(
        WordLevel({f"w{number}": number for number in range(11)}, unk_token="w0")
    )
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    assert "HuggingFaceTokenizer" in work._tokenizer_flags(
        path, replace(MODEL, vocab=11)
    )
    with pytest.raises(UserError, match="the token 10, .* ends at 9"):
        work._tokenizer_flags(path, MODEL)


def test_a_tokenizer_with_code(folder):
    path = folder(LLAMA)
    harm = f"open({str(path / 'harmed')!r}, 'w')"
    (path / "evil.py").write_text(harm)
    (path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["evil.Evil", None]}})
    )
    with pytest.raises(UserError, match="the tokenizer cannot be read: .* custom code"):
        work._tokenizer_flags(path, MODEL)
    assert not (path / "harmed").exists()


def test_only_a_tokenizers_own_files_are_copied(folder, tmp_path_factory):
    path, target, outside = (
        folder(LLAMA),
        tmp_path_factory.mktemp("target"),
        tmp_path_factory.mktemp("outside"),
    )
    (outside / "secret").write_text("secret")
    (path / "tokenizer.real").write_text("words")
    for name, file in (
        ("notes.txt", outside / "secret"),
        ("tokenizer.json", path / "tokenizer.real"),
    ):
        (path / name).symlink_to(file)
    hugging_face_folder.copy_files(path, target)
    assert sorted(file.name for file in target.iterdir()) == [
        "config.json",
        "tokenizer.json",
    ]
    (path / "vocab.json").symlink_to(outside / "secret")
    with pytest.raises(UserError, match="vocab.json: it is a link out of the folder"):
        hugging_face_folder.copy_files(path, target)
    # of the Hub's cache, whose files are links
    revision = outside / "snapshots" / "main"
    revision.mkdir(parents=True)
    (revision / "merges.txt").symlink_to(outside / "secret")
    hugging_face_folder.copy_files(revision, target)
    assert (target / "merges.txt").read_text() == "secret"
