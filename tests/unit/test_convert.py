"""Importing and exporting: the order of rows, what config.json asks for, and one line for each wrong input."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from megatron_2bw.convert import cli, config, hugging_face, work
from megatron_2bw.convert.families import FAMILIES, PADDING_BIAS, to_hugging_face, to_megatron
from megatron_2bw.errors import UserError
from megatron_2bw.models.model import Model

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 12, "vocab_size": 10}
SIZES["max_position_embeddings"] = 16
LLAMA = SIZES | {"model_type": "llama", "num_key_value_heads": 2, "tie_word_embeddings": False}
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 16, "vocab_size": 10}
BERT = SIZES | {"model_type": "megatron-bert", "architectures": ["MegatronBertForPreTraining"]}
MODEL = Model("llama", 1, 8, 4, vocab=10, groups=2, ffn=12)


# --- the order of rows ----------------------------------------------------------------------------------------------


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)[:, None].expand(-1, 8)


def test_queries_keys_and_values_are_ordered_by_group():
    """Two groups of two query heads of size 2: q0 q1 k0 v0, q2 q3 k1 v1."""
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    queries, keys, values = rows(*range(8)), rows(*range(10, 14)), rows(*range(20, 24))
    whole = to_megatron(FAMILIES["llama"], name, [queries, keys, values], MODEL)
    assert whole[:, 0].tolist() == [0, 1, 2, 3, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 22, 23]
    back = to_hugging_face(FAMILIES["llama"], name, whole, MODEL)
    assert all(torch.equal(one, other) for one, other in zip(back, [queries, keys, values]))


def test_gpt2_has_its_inputs_first():
    name, model = "decoder.layers.0.self_attention.linear_qkv.weight", Model("gpt2", 1, 4, 2)
    whole = torch.arange(48.0).reshape(4, 12)  # [inputs, queries, keys and values]
    ours = to_megatron(FAMILIES["gpt2"], name, [whole], model)
    assert ours[:, 0].tolist() == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]
    assert torch.equal(to_hugging_face(FAMILIES["gpt2"], name, ours, model)[0], whole)


def test_the_gate_is_before_the_upper_half():
    name, gate, up = "decoder.layers.0.mlp.linear_fc1.weight", rows(*range(12)), rows(*range(12, 24))
    whole = to_megatron(FAMILIES["llama"], name, [gate, up], MODEL)
    assert whole[:, 0].tolist() == list(range(24))
    assert torch.equal(to_hugging_face(FAMILIES["llama"], name, whole, MODEL)[1], up)


def test_padding_rows_are_added_and_cut():
    words, bias = rows(*range(10)), torch.arange(10.0)
    for kind, name, tensor in (("llama", "output_layer.weight", words), ("megatron-bert", "output_layer.bias", bias)):
        whole = to_megatron(FAMILIES[kind], name, [tensor], MODEL, rows=16)
        assert len(whole) == 16 and torch.equal(to_hugging_face(FAMILIES[kind], name, whole, MODEL)[0], tensor)
        assert (whole[10:] == (PADDING_BIAS if "bias" in name else 9)).all()


# --- config.json ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Writes a folder: its configuration, and tensors of the shapes that it asks for."""

    def write(content: dict, tensors: dict[str, torch.Tensor] | None = None) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(content))
        save_file(llama_tensors() if tensors is None else tensors, tmp_path / "model.safetensors")
        return tmp_path

    return write


def llama_tensors() -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    return {name: torch.ones(tensor.shape) for name, tensor in model.state_dict().items()}


def test_flags_of_a_gpt2_with_shorter_samples(folder):
    found = config.read(folder(GPT2 | {"resid_pdrop": 0.2, "attn_pdrop": 0.1}) / "config.json", 8)
    flags = " ".join(found.flags)
    assert "--seq-length 8 --max-position-embeddings 16" in flags and "--openai-gelu" in flags
    assert "--hidden-dropout 0.2" in flags and "--attention-dropout" not in flags


def test_a_long_model_has_samples_of_4096_tokens(folder):
    path = folder(LLAMA | {"max_position_embeddings": 131072}) / "config.json"
    assert "--seq-length 4096" in " ".join(config.read(path, None).flags)
    assert "--seq-length 8192" in " ".join(config.read(path, 8192).flags)


def test_a_bert_with_one_head(folder):
    path = folder(BERT | {"architectures": ["MegatronBertForMaskedLM"]}) / "config.json"
    assert "--bert-no-binary-head" in config.read(path, None).flags
    assert "--bert-no-binary-head" not in config.read(folder(BERT) / "config.json", None).flags


@pytest.mark.parametrize(
    "content, line",
    [
        (LLAMA | {"model_type": "bert"}, "model_type 'bert' has its norms after each layer"),
        (LLAMA | {"model_type": "mixtral"}, "model_type 'mixtral' is not supported; those that are: llama, "),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, "'architectures' is LlamaForSequence"),
        (LLAMA | {"model_type": "mistral", "architectures": None, "sliding_window": 8}, "sliding_window"),
    ],
)
def test_what_megatron_cannot_represent(content, line, folder):
    with pytest.raises(UserError) as error:
        config.read(folder(content) / "config.json", None)
    assert line in str(error.value) and "config.json" in str(error.value) and "\n" not in str(error.value)


def test_more_tokens_than_positions(folder):
    with pytest.raises(UserError, match="--seq-length 17: the model has only 16 positions"):
        config.read(folder(GPT2) / "config.json", 17)


# --- the tensors ----------------------------------------------------------------------------------------------------


def complaint(path: Path) -> str | None:
    """The line about the tensors of a folder of LLAMA, or None."""
    found = config.read(path / "config.json", None)
    shapes = {
        name: tuple(to_megatron(found.family, name, [llama_tensors()[part] for part in parts], found.model).shape)
        for name, parts in sources(found).items()
    }
    try:
        weights = hugging_face.Weights(path)
        names = {name: work._sources(found.family, name, weights) for name in shapes}
        work._check(found, weights, names, shapes, 10)
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return None


def sources(found) -> dict[str, tuple[str, ...]]:
    names = {ours.replace("*", "0"): found.family.sources(ours.replace("*", "0")) for ours in found.family.names}
    return {name: parts for name, parts in names.items() if all(part in llama_tensors() for part in parts)}


def test_whole_folders_with_and_without_a_prefix(folder):
    held = llama_tensors()
    bare = {name.removeprefix("model."): tensor for name, tensor in held.items()}
    for tensors in (held, bare, held | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1)}):
        assert complaint(folder(LLAMA, tensors)) is None


NORM, ATTENTION = "model.norm.weight", "model.layers.0.self_attn."


@pytest.mark.parametrize(
    "change, line",
    [
        ({NORM: None}, f"the tensor {NORM} is missing, which config.json asks for"),
        ({NORM: torch.ones(9)}, f"the tensor {NORM} [9] does not fit config.json"),
        ({ATTENTION + "k_proj.weight": torch.ones(3, 8)}, "k_proj.weight [3, 8], "),
        ({NORM: torch.ones(8, dtype=torch.int8)}, f"the tensor {NORM} is of type I8: only F32"),
        ({ATTENTION + "q_proj.bias": torch.ones(8)}, "q_proj.bias has no place in Megatron's model"),
    ],
)
def test_tensors_that_do_not_fit(change, line, folder):
    held = {name: tensor for name, tensor in (llama_tensors() | change).items() if tensor is not None}
    assert line in complaint(folder(LLAMA, held))


def test_files_that_are_missing_or_cut_short(folder):
    path = folder(LLAMA)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "cut short or no file of safetensors" in complaint(path)
    file.unlink()
    assert f"there is neither {hugging_face.INDEX} nor" in complaint(path)
    weight_map = {NORM: "model-00002-of-00002.safetensors"}
    (path / hugging_face.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert "model-00002-of-00002.safetensors: it is missing" in complaint(path)
    save_file({"other": torch.ones(1)}, path / weight_map[NORM])
    assert NORM in complaint(path)


def test_large_models_have_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(hugging_face, "SHARD", 100)
    held = {f"t{number}": torch.full((number,), 1.0) for number in (10, 20, 1, 40)}
    hugging_face.write(tmp_path, held.items())
    weights = hugging_face.Weights(tmp_path)
    assert set(weights.shapes) == set(held) and all(torch.equal(weights.read(name), held[name]) for name in held)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    assert set(load_file(tmp_path / files[1])) == {"t20", "t1"}


# --- exporting ------------------------------------------------------------------------------------------------------


SIZED = dict(num_layers=1, hidden_size=8, num_attention_heads=4, num_query_groups=2, kv_channels=2, ffn_hidden_size=12)
SIZED |= dict(vocab_size=10, padded_vocab_size=16, max_position_embeddings=16)
OFF = "add_bias_linear add_qkv_bias use_rope_scaling qk_layernorm openai_gelu bias_gelu_fusion".split()
ON = "group_query_attention swiglu untie_embeddings_and_output_weights bert_binary_head".split()
ARGS = SIZED | dict.fromkeys(OFF, False) | dict.fromkeys(ON, True)
ARGS |= dict(task="gpt", normalization="RMSNorm", layernorm_epsilon=1e-6, attention_dropout=0.1, hidden_dropout=0.1)
ARGS |= dict(position_embedding_type="rope", rotary_base=10000, rope_scaling_factor=8.0)
PLAIN = dict(group_query_attention=False, swiglu=False, normalization="LayerNorm", add_bias_linear=True)
PLAIN["position_embedding_type"] = "learned_absolute"


def exported(like=None, **changes):
    return config.of_arguments(argparse.Namespace(**ARGS | changes), like)


@pytest.mark.parametrize(
    "changes, kind",
    [
        ({}, "llama"),
        ({"add_qkv_bias": True}, "qwen2"),
        ({"qk_layernorm": True}, "qwen3"),
        (PLAIN, "gpt2"),
        (PLAIN | {"task": "bert"}, "megatron-bert"),
    ],
)
def test_the_family_of_a_checkpoint(changes, kind):
    found, content = exported(**changes)
    assert found.kind == content["model_type"] == kind and content["architectures"][0] in config.ARCHITECTURES[kind]
    assert content["vocab_size"] == 10


def test_a_configuration_is_read_as_the_model_it_was_written_for(tmp_path):
    for changes in ({}, {"add_qkv_bias": True}, {"qk_layernorm": True}, {"use_rope_scaling": True}, PLAIN):
        found, content = exported(**changes)
        (tmp_path / "config.json").write_text(json.dumps(content))
        again = config.read(tmp_path / "config.json", 16)
        same = dict(name="", dropout=False)
        assert replace(again.model, **same) == replace(found.model, **same)


def test_the_configuration_of_the_imported_model_is_kept(folder):
    path = folder(LLAMA | {"rms_norm_eps": 1e-6, "eos_token_id": 7, "max_position_embeddings": 512})
    assert exported(path)[1]["eos_token_id"] == 7
    assert exported(path, num_layers=2)[1].get("eos_token_id") is None  # a tokenizer of another model


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"swiglu": False}, "--position-embedding-type rope, --swiglu"),
        (PLAIN | {"swiglu": True}, "--position-embedding-type rope, --swiglu"),
        (PLAIN | {"kv_channels": 4}, "GPT-2 and MegatronBert have none"),
        ({"qk_layernorm": True, "add_qkv_bias": True}, "--qk-layernorm and --add-qkv-bias"),
        ({"num_experts": 4}, "only dense models can be exported"),
    ],
)
def test_models_that_transformers_does_not_have(changes, line):
    with pytest.raises(UserError, match=line):
        exported(**changes)


@pytest.mark.parametrize(
    "words, line",
    [
        (["import", "no/such", "--save", "x"], "no/such: there is no such folder"),
        (["import", ".", "--save", "x", "--seq-length", "-1"], "argument --seq-length: -1: must be"),
        (["export", "no/such", "--out", "x"], "no/such: there is no such folder"),
        (["export", ".", "--out", "."], "--out .: it exists already"),
        (["exprot"], "'exprot'"),
    ],
)
def test_wrong_words(words, line, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(words, "megatron-2bw convert")
    assert end.value.code == 2 and line in capsys.readouterr().err.splitlines()[-1]


def test_a_folder_that_holds_a_checkpoint(folder, capsys):
    path = folder(LLAMA)
    (path / "latest_checkpointed_iteration.txt").write_text("release")
    with pytest.raises(SystemExit):
        cli.main(["import", str(path), "--save", str(path)], "megatron-2bw convert")
    assert "it holds a checkpoint already: give another folder" in capsys.readouterr().err


def test_a_tokenizer_of_another_model(folder):
    path = folder(LLAMA)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(11)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    assert "HuggingFaceTokenizer" in work._tokenizer_flags(path, replace(MODEL, vocab=11))
    with pytest.raises(UserError, match="the token 10, .* ends at 9"):
        work._tokenizer_flags(path, MODEL)


def test_a_mistral_is_one_if_its_configuration_is_at_hand(folder):
    path = folder(LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None})
    assert exported(path)[0].kind == "mistral" and exported()[0].kind == "llama"
