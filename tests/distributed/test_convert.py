"""Hugging Face's models in Megatron: the same logits on any split, and the same bits on
the way back."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_2bw.base.local_ranks import WorldError, run_world
from megatron_2bw.cli import main
from megatron_2bw.tools.convert import config
from megatron_2bw.tools.convert.families import to_hugging_face
from megatron_2bw.tools.convert.megatron import saved_arguments
from tests.distributed.training import BERT, train

pytestmark = pytest.mark.cpu

BRIDGE = Path(__file__).parents[2] / "build" / "oracles"
SIZES = dict(
    hidden_size=64, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4
)
SIZES |= dict(intermediate_size=96, vocab_size=1001, max_position_embeddings=32)
ROUTED = dict(
    num_local_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    mlp_only_layers=[0],
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
LLAMA3["original_max_position_embeddings"] = 8192
ENCODER = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
MODELS = {  # transformers' class, and its configuration
    "llama": ("LlamaForCausalLM", SIZES | dict(rope_parameters=LLAMA3)),
    "mistral": ("MistralForCausalLM", SIZES | dict(sliding_window=None, head_dim=16)),
    "qwen2": ("Qwen2ForCausalLM", SIZES | dict(tie_word_embeddings=True)),
    "qwen3": (
        "Qwen3ForCausalLM",
        SIZES
        | dict(head_dim=16, rope_parameters=dict(rope_type="default", rope_theta=1e6)),
    ),
    "mixtral": (
        "MixtralForCausalLM",
        SIZES | dict(num_local_experts=4, num_experts_per_tok=2),
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", SIZES | dict(head_dim=16) | ROUTED),
    "gpt2": (
        "GPT2LMHeadModel",
        dict(n_layer=4, n_embd=64, n_head=8, n_positions=32, vocab_size=1001),
    ),
    "bert": ("MegatronBertForPreTraining", ENCODER),
    "bert, one head": (
        "MegatronBertForMaskedLM",
        ENCODER | dict(hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-5),
    ),
}
ROUTED_ALONE = {
    "experts": (
        "Qwen3MoeForCausalLM",
        SIZES | dict(head_dim=16) | ROUTED | dict(mlp_only_layers=[]),
    )
}
RUN = (
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 1e-3 "
    "--eval-iters 0 --eval-interval 9 --mock-data "
    "--attention-dropout 0 --hidden-dropout 0 --num-workers 0 --log-interval 1 "
    "--device cpu --pipeline-schedule 2bw"
)


def made(name: str):
    """The model with random weights, biases and norms."""
    import transformers

    kind, sizes = (MODELS | ROUTED_ALONE)[name]
    torch.manual_seed(3)
    model = getattr(transformers, kind)(
        getattr(transformers, kind).config_class(**sizes)
    ).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    if name == "bert, one head":
        model.bert.embeddings.token_type_embeddings.weight.data.zero_()
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the model in Hugging Face's format, `hf`, and Megatron's, `ckpt`;
    made once for each model."""
    folders: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name.replace(", ", "_"))
            made(name).save_pretrained(folders[name] / "hf")
            convert(
                "import", folders[name] / "hf", "--save", folders[name] / "ckpt", *PAD
            )
        return folders[name]

    return get


PAD = ("--make-vocab-size-divisible-by", "2")  # for two tensor ranks


def convert(*words) -> None:
    run_world(1, convert_here, [str(word) for word in words])


def convert_here(rank: int, words: list[str]) -> None:
    assert main(["convert", *words]) == 0


def tokens() -> torch.Tensor:
    return torch.randint(1001, (2, 32), generator=torch.Generator().manual_seed(5))


def logits_of(rank: int, argv: list[str]) -> tuple[dict, int]:
    """What the loaded model answers, on the last stage; and how many iterations it was
    then trained."""
    from megatron.core import mpu
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import (
        gather_from_tensor_model_parallel_region as gather,
    )

    found = {}

    def forward(_data, model):
        batch = tokens()
        if argv[0] == BERT:
            types = (
                None
                if "--bert-no-binary-head" in argv
                else (torch.arange(32) >= 16).long().expand(2, -1)
            )
            output = model(batch, torch.ones_like(batch), tokentype_ids=types)
            # an earlier stage has one tensor
            words, order = output if isinstance(output, tuple) else (output, None)
            return words, lambda out, non_loss_data: (out, order)
        mask = torch.ones(1, 1, 32, 32).triu(1) > 0
        return model(
            batch, torch.arange(32).expand(2, -1), mask
        ), lambda out, non_loss_data: (out, None)

    def ask(models, _optimizer):
        models[0].eval()
        run = schedules.get_forward_backward_func()
        with torch.no_grad():
            sizes = dict(num_microbatches=1, seq_length=32, micro_batch_size=2)
            only = dict(forward_only=True, collect_non_loss_data=True)
            answers = run(
                forward_step_func=forward,
                data_iterator=None,
                model=models,
                **sizes,
                **only,
            )
        if mpu.is_pipeline_last_stage():
            ((words, order),) = answers
            found.update(words=gather(words)[..., :1001].clone(), order=order)
        models[0].train()

    run = train(rank, argv, prepare=ask)
    return found, len(run.iterations)


@pytest.mark.proof("llama-2-1")
@pytest.mark.parametrize(
    "name, stages, tensor",
    [
        *((name, 2, 1) for name in MODELS),
        ("llama", 1, 2),
        ("gpt2", 1, 2),
        ("bert", 1, 2),
    ],
)
def test_logits_are_those_of_transformers(name, stages, tensor, folder):
    flags = shlex.split((folder(name) / "ckpt" / "model_flags.txt").read_text())
    argv = [*flags, *RUN.split(), "--load", str(folder(name) / "ckpt"), "--finetune"]
    argv += [
        "--pipeline-model-parallel-size",
        str(stages),
        "--tensor-model-parallel-size",
        str(tensor),
    ]
    argv = [*[BERT] * name.startswith("bert"), *argv]
    found, iterations = run_world(stages * tensor, logits_of, argv)[-1]
    assert iterations == 3
    model = made(name)
    with torch.no_grad():
        if name.startswith("bert"):
            types = (torch.arange(32) >= 16).long().expand(2, -1)
            answer = model(tokens(), token_type_ids=types)
            words = getattr(answer, "prediction_logits", None)
            words = answer.logits if words is None else words
            order = getattr(answer, "seq_relationship_logits", None)
        else:
            words, order = model(tokens()).logits, None
    assert words.abs().max() > 1
    torch.testing.assert_close(found["words"], words, rtol=0, atol=1e-5)
    if order is not None:
        torch.testing.assert_close(found["order"], order, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_way_back_gives_the_same_bits(name, folder):
    from transformers import AutoConfig, AutoModel

    there, back = folder(name) / "hf", folder(name) / "back"
    convert(
        "export",
        folder(name) / "ckpt",
        "--out",
        back,
        *["--like", there] * (name == "mistral"),
    )
    before, after = (
        load_file(there / "model.safetensors"),
        load_file(back / "model.safetensors"),
    )
    assert before.keys() == after.keys() and all(
        torch.equal(before[key], after[key]) for key in before
    )
    config, expected = (
        AutoConfig.from_pretrained(back),
        AutoConfig.from_pretrained(there),
    )
    assert type(config) is type(expected) and (
        config.eos_token_id == expected.eos_token_id or name != "mistral"
    )
    content = json.loads((back / "config.json").read_text())
    # which readers before transformers 5 lack
    for renamed in ("rope_parameters", "dtype", "num_local_experts"):
        content.pop(renamed, None)
    for found in (config, AutoConfig.for_model(**content)):
        assert (
            getattr(expected, "rope_parameters", {}).items()
            <= getattr(found, "rope_parameters", {}).items()
        )
        assert (found.dtype, getattr(found, "num_experts", 0)) == (
            expected.dtype,
            getattr(expected, "num_experts", 0),
        )
    assert (
        AutoModel.from_pretrained(back).num_parameters()
        == AutoModel.from_pretrained(there).num_parameters()
    )


# --- megatron-bridge
# --------------------------------------------------------------------------------------


# what it has; of mixtures those without dense layers
DECODERS = ("llama", "mistral", "qwen2", "qwen3", "experts")


@pytest.mark.skipif(
    not (BRIDGE / ".installed").exists(),
    reason="`make oracles` makes the environment that it needs",
)
@pytest.mark.timeout(900)  # its imports take minutes on a busy machine
def test_megatron_bridge_converts_to_the_same_bits(folder):
    """Its weights are those that its model reads from our checkpoint; it exports these
    as the model that was imported.

    The sizes that it takes from config.json are those of our flags.
    """
    for name in DECODERS:
        convert("import", folder(name) / "hf", "--save", folder(name) / "unpadded")
    command = [
        BRIDGE / "bin" / "python",
        Path(__file__).with_name("bridge.py"),
        *map(folder, DECODERS),
    ]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    for name in DECODERS:
        weights, sizes = load(folder(name) / "theirs.pt")
        assert same(load(folder(name) / "ours.pt"), weights) and len(weights) > 4 * 6, (
            name
        )
        assert same(
            load(folder(name) / "back.pt"),
            load_file(folder(name) / "hf" / "model.safetensors"),
        ), name
        args = vars(saved_arguments(folder(name) / "unpadded" / "release"))
        assert {size: args[size] for size in sizes} == sizes, name


def load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def test_trained_weights_are_those_that_are_exported(folder, tmp_path):
    """All, and of 2BW the newest; from two stages of 1 and 3 layers."""
    flags = shlex.split((folder("qwen3") / "ckpt" / "model_flags.txt").read_text())
    layout = (
        "--pipeline-model-parallel-size",
        "2",
        "--pipeline-model-parallel-layout",
        "Et|tttL",
    )
    argv = [
        *flags,
        *RUN.split(),
        *layout,
        "--load",
        str(folder("qwen3") / "ckpt"),
        "--finetune",
    ]
    runs = run_world(
        2, train, [*argv, "--save", str(tmp_path / "run"), "--save-interval", "3"]
    )
    convert("export", tmp_path / "run", "--out", tmp_path / "hf")
    held = load_file(tmp_path / "hf" / "model.safetensors")
    found = config.read(tmp_path / "hf" / "config.json", 32)
    trained: dict[str, torch.Tensor] = {}
    for ours, weight in [pair for run in runs for pair in run.weights.items()]:
        parts = to_hugging_face(found.family, ours, weight, found.model)
        trained |= zip(found.family.sources(ours), parts)
    assert same(trained, held) and not same(trained, made("qwen3").state_dict())


def test_what_was_not_written_to_its_end_is_not_loaded(tmp_path):
    """Here the last tensor is not a number. The same folder takes the whole model
    afterwards."""
    made("llama").save_pretrained(tmp_path / "hf")
    held = load_file(tmp_path / "hf" / "model.safetensors")
    save_file(
        held | {"lm_head.weight": held["lm_head.weight"] * torch.nan},
        tmp_path / "hf" / "model.safetensors",
    )
    words = ["import", tmp_path / "hf", "--save", tmp_path / "ckpt"]
    with pytest.raises(WorldError, match="the tensor lm_head.weight holds NaN"):
        convert(*words)
    assert (tmp_path / "ckpt" / "release").is_dir()
    assert not (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").exists()
    assert not (tmp_path / "ckpt" / "release" / "metadata.json").exists()
    save_file(held, tmp_path / "hf" / "model.safetensors")
    convert(*words)
    assert (
        tmp_path / "ckpt" / "latest_checkpointed_iteration.txt"
    ).read_text() == "release"


UNUSED = [  # by model: a tensor, and of which it is a copy
    ("qwen2", "lm_head.weight", "model.embed_tokens.weight"),
    ("gpt2", "lm_head.weight", "transformer.wte.weight"),
    (
        "bert",
        "cls.predictions.decoder.weight",
        "bert.embeddings.word_embeddings.weight",
    ),
    ("bert", "cls.predictions.decoder.bias", "cls.predictions.bias"),
    ("bert, one head", "bert.embeddings.token_type_embeddings.weight", "0"),
]


@pytest.mark.parametrize("name, tensor, original", UNUSED)
def test_a_tensor_without_a_place_must_be_what_the_model_has(
    name, tensor, original, tmp_path
):
    """A folder may hold a copy of another tensor, and zeros for what Megatron lacks.
    Here the last row is another."""
    model = made(name)
    model.save_pretrained(tmp_path / "hf")
    held = load_file(tmp_path / "hf" / "model.safetensors") | {
        tensor: model.state_dict()[tensor].clone()
    }
    save_file(held, tmp_path / "hf" / "model.safetensors")
    convert("import", tmp_path / "hf", "--save", tmp_path / "same")
    held[tensor][-1] += 1
    save_file(held, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(
        WorldError, match=f"the tensor {tensor} differs from {original}, but"
    ):
        convert("import", tmp_path / "hf", "--save", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "bert"])
def test_adapters_are_those_of_peft(name, folder, tmp_path):
    """peft's model with them, and the merged one, have the outputs of Megatron's."""
    import transformers
    from peft import PeftModel

    there = folder(name)
    argv = [
        *shlex.split((there / "ckpt" / "model_flags.txt").read_text()),
        *RUN.split(),
        "--lora-rank",
        "4",
    ]
    argv += ["--lora-base", str(there / "ckpt"), "--pipeline-model-parallel-size", "2"]
    argv = [*[BERT] * (name == "bert"), *argv]
    run_world(
        2,
        train,
        [*argv, "--lr", "0.1", "--save", str(tmp_path / "run"), "--save-interval", "3"],
    )
    ours = run_world(
        2, logits_of, [*argv, "--load", str(tmp_path / "run"), "--finetune"]
    )[-1][0]["words"]
    convert(
        "export", tmp_path / "run", "--out", tmp_path / "peft", "--like", there / "hf"
    )
    convert("export", tmp_path / "run", "--out", tmp_path / "merged", "--merge")
    before = made(name)
    merged = getattr(transformers, MODELS[name][0]).from_pretrained(tmp_path / "merged")
    types = (
        dict(token_type_ids=(torch.arange(32) >= 16).long().expand(2, -1))
        if name == "bert"
        else {}
    )
    answers = [before(tokens(), **types)[0], merged(tokens(), **types)[0]]
    answers.append(
        PeftModel.from_pretrained(before, tmp_path / "peft").eval()(tokens(), **types)[
            0
        ]
    )
    assert (answers[0] - ours).abs().max() > 0.1
    for answer in answers[1:]:
        torch.testing.assert_close(answer, ours, rtol=0, atol=2e-5)
