"""Importing and exporting: padding, what config.json asks for, and one line for each
wrong input."""

import json
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

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "vocab_size": 10,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 16}
MODEL = Model("llama", 1, 8, 4, vocab=10, groups=2, ffn=12)


# --- rows
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "size", "padding"),
    [
        ("llama", "output_layer.weight", (10, 8), 9),
        ("megatron-bert", "output_layer.bias", (10,), PADDING_BIAS),
    ],
)
def test_padding_rows_are_added_and_cut(kind, name, size, padding):
    tensor = torch.arange(10.0)
    if len(size) > 1:
        tensor = tensor[:, None].expand(size)
    whole = to_megatron(FAMILIES[kind], name, [tensor], MODEL, rows=16)
    assert len(whole) == 16 and (whole[10:] == padding).all()
    (back,) = to_hugging_face(FAMILIES[kind], name, whole, MODEL)
    assert torch.equal(back, tensor)


# --- config.json
# --------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Writes a folder: its configuration, and tensors of the shapes that it asks
    for."""

    def write(content: dict, tensors: dict[str, torch.Tensor] | None = None) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(content))
        file = tmp_path / "model.safetensors"
        save_file(llama_tensors() if tensors is None else tensors, file)
        return tmp_path

    return write


def llama_tensors() -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    return {name: torch.ones(shape) for name, shape in shapes.items()}


def test_flags_of_a_gpt2_with_shorter_samples(folder):
    path = folder(GPT2 | {"resid_pdrop": 0.2, "attn_pdrop": 0.1}) / "config.json"
    flags = " ".join(config.read(path, 8).flags)
    assert "--seq-length 8 --max-position-embeddings 16" in flags
    assert "--openai-gelu" in flags and "--hidden-dropout 0.2" in flags
    assert "--attention-dropout" not in flags
    with pytest.raises(UserError, match="--seq-length 17: .* only 16 positions"):
        config.read(path, 17)


def test_a_long_model_has_samples_of_4096_tokens(folder):
    # as on the Hub
    more = {"is_llama_config": True, "pruned_heads": {}}
    more["position_embedding_type"] = "absolute"
    path = folder(LLAMA | more | {"max_position_embeddings": 131072}) / "config.json"
    for length, expected in ((None, "4096"), (8192, "8192")):
        flags = config.read(path, length).flags
        assert flags[flags.index("--seq-length") + 1] == expected


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"model_type": "bloom"}, "model_type 'bloom' is not supported"),
        ({"architectures": ["LlamaModelX"]}, "'architectures' is LlamaModelX"),
        ({"model_type": "mistral", "sliding_window": 8}, "sliding_window"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
    ],
)
def test_what_megatron_cannot_represent(change, line, folder):
    path = folder(LLAMA | change) / "config.json"
    with pytest.raises(UserError) as error:
        config.read(path, None)
    text = str(error.value)
    assert line in text and str(path) in text and "\n" not in text


# --- the tensors
# --------------------------------------------------------------------------------------


def complaint(path: Path) -> str | None:
    """The line about the tensors of a folder of LLAMA, or None."""
    common = config.read(path / "config.json", None)
    try:
        work._files(common, hugging_face_folder.Weights(path).shapes)
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return None


def test_whole_folders_with_and_without_a_prefix(folder):
    held = llama_tensors()
    bare = {name.removeprefix("model."): tensor for name, tensor in held.items()}
    old = held | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1)}
    for tensors in (held, bare, old):
        assert complaint(folder(LLAMA, tensors)) is None


NORM = "model.norm.weight"
BIAS = "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("name", "tensor", "line"),
    [
        (NORM, None, "is missing; config.json's LlamaForCausalLM has it as (8,)"),
        (NORM, torch.ones(9), "is (9,); config.json's LlamaForCausalLM has it as (8,)"),
        (NORM, torch.ones(8, dtype=torch.int8), "is of type I8: only F32"),
        (BIAS, torch.ones(8), "is (8,); config.json's"),
    ],
)
def test_tensors_that_do_not_fit(name, tensor, line, folder):
    held = llama_tensors()
    held.pop(name, None)
    if tensor is not None:
        held[name] = tensor
    assert f"the tensor {name} {line}" in complaint(folder(LLAMA, held))


def test_files_that_are_missing_or_cut_short(folder):
    path = folder(LLAMA)
    index = path / hugging_face_folder.INDEX
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "cut short or no file of safetensors" in complaint(path)
    file.unlink()
    assert f"there is neither {index.name} nor" in complaint(path)
    part = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps({"weight_map": {NORM: part}}))
    assert f"{part}: it is missing" in complaint(path)
    save_file({"other": torch.ones(1)}, path / part)
    assert "the tensor lm_head.weight is missing" in complaint(path)


def test_large_models_have_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(hugging_face_folder, "SHARD", 100)
    held = {f"t{number}": torch.ones(number) for number in (10, 20, 1, 40)}
    hugging_face_folder.write(tmp_path, held.items())
    for number, names in enumerate([{"t10"}, {"t20", "t1"}, {"t40"}], 1):
        file = tmp_path / f"model-0000{number}-of-00003.safetensors"
        assert load_file(file).keys() == names
    index = tmp_path / hugging_face_folder.INDEX
    index.write_text(index.read_text().replace('"t1"', '"t20"'))
    # a file's tensors that the index leaves out, too
    weights = hugging_face_folder.Weights(tmp_path)
    assert weights.shapes.keys() == held.keys()
    for name, tensor in held.items():
        assert torch.equal(weights.read(name), tensor)
    save_file({"t1": held["t1"]}, tmp_path / hugging_face_folder.SINGLE)
    # transformers reads the one file then
    assert hugging_face_folder.Weights(tmp_path).shapes.keys() == {"t1"}


# --- the command line and the tokenizer
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("import . --save .", "it holds a checkpoint already: give another folder"),
        ("export . --out .", "--out .: it exists already"),
    ],
)
def test_nothing_is_overwritten(words, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("latest_checkpointed_iteration.txt").write_text("release")
    with pytest.raises(SystemExit, match="2"):
        convert_command.main(words.split(), "megatron-2bw convert")
    assert line in capsys.readouterr().err


def test_a_tokenizer_of_another_model(tmp_path):
    words = {f"w{number}": number for number in range(11)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    assert "HuggingFaceTokenizer" in work._tokenizer_flags(tmp_path, 11)
    with pytest.raises(UserError, match="the token 10, .* ends at 9"):
        work._tokenizer_flags(tmp_path, 10)


def test_a_tokenizer_with_code(folder):
    path = folder(LLAMA)
    (path / "evil.py").write_text(f"open({str(path / 'harmed')!r}, 'w')")
    content = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (path / "tokenizer_config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="the tokenizer cannot be read: .* custom code"):
        work._tokenizer_flags(path, 10)
    assert not (path / "harmed").exists()


def test_only_a_tokenizers_own_files_are_copied(tmp_path):
    path = tmp_path / "model"
    target = tmp_path / "target"
    secret = tmp_path / "secret"
    path.mkdir()
    secret.write_text("secret")
    (path / "tokenizer.real").write_text("words")
    (path / "tokenizer.json").symlink_to(path / "tokenizer.real")
    (path / "config.json").write_text("{}")
    (path / "notes.txt").symlink_to(secret)
    hugging_face_folder.copy_files(path, target)
    names = {file.name for file in target.iterdir()}
    assert names == {"config.json", "tokenizer.json"}
    (path / "vocab.json").symlink_to(secret)
    with pytest.raises(UserError, match="vocab.json: it is a link out of the folder"):
        hugging_face_folder.copy_files(path, target)


def test_files_of_the_hubs_cache_are_links(tmp_path):
    revision = tmp_path / "snapshots" / "main"
    revision.mkdir(parents=True)
    (tmp_path / "blob").write_text("words")
    (revision / "merges.txt").symlink_to(tmp_path / "blob")
    hugging_face_folder.copy_files(revision, tmp_path / "target")
    assert (tmp_path / "target" / "merges.txt").read_text() == "words"
