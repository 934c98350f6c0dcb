"""The planner's models: their parameters are those of Megatron's own modules, their
flags mean them, files are read."""

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from megatron_2bw.base.errors import UserError
from megatron_2bw.base.files import read_yaml
from megatron_2bw.mcore import cpu
from megatron_2bw.tools.planner.cost.memory import Memory
from megatron_2bw.tools.planner.descriptions.hugging_face_config import (
    from_hugging_face,
)
from megatron_2bw.tools.planner.descriptions.inputs import add_model_flags, model_of
from megatron_2bw.tools.planner.descriptions.model import (
    ARGUMENTS,
    PRESETS,
    Model,
)
from megatron_2bw.tools.planner.descriptions.plan import Plan


def read_models() -> dict[str, Model]:
    """The models of models.yaml by name."""
    models = {}
    for row in read_yaml(Path(__file__).with_name("models.yaml")):
        like = row.pop("like", None)
        models[row["name"]] = replace(models[like], **row) if like else Model(**row)
    return models


TINY = read_models()
GPT = TINY["gpt"]
RUN = (
    "--mock-data --tokenizer-type NullTokenizer --micro-batch-size 1 "
    "--train-iters 1 --lr 1 --min-lr 0 "
    "--transformer-impl local --no-gradient-accumulation-fusion "
    "--no-persist-layer-norm --no-masked-softmax-fusion "
    "--no-rope-fusion --no-bias-dropout-fusion --use-cpu-initialization"
).split()


# --- against Megatron's modules
# --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parse():
    """Megatron's parser and checks, on a host that answers for CUDA."""
    was_installed = cpu.installed()
    cpu.install()
    from megatron.training.arguments import add_megatron_arguments, validate_args

    from megatron_2bw.mcore import patches, rebinding

    undo = rebinding.apply(
        [patch for patch in patches.for_cpu() if patch.name == "_set_cuda_rng_state"]
    )
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))

    def parsed(model: Model, tensor: int = 1, depth: int = 1) -> argparse.Namespace:
        sizes = [
            "--tensor-model-parallel-size",
            str(tensor),
            "--pipeline-model-parallel-size",
            str(depth),
        ]
        args = parser.parse_args(
            [*model.flags(), *RUN, "--vocab-size", str(model.vocab), *sizes]
        )
        args.rank = 0
        args.world_size = tensor * depth
        validate_args(args)
        return args

    yield parsed
    undo()
    if not was_installed:
        cpu.uninstall()


@pytest.fixture
def stage_of(parse):
    """Megatron's modules of a stage, on one of its tensor ranks, as tensors without
    data."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.vocab_utils import calculate_padded_vocab_size
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def build(model: Model, tensor: int = 1, depth: int = 1, stage: int = 0):
        args = parse(model, tensor, depth)
        config = core_transformer_config_from_args(args)
        vocab = calculate_padded_vocab_size(
            model.vocab, args.make_vocab_size_divisible_by, tensor
        )
        given = dict(
            vocab_size=vocab,
            max_sequence_length=args.max_position_embeddings,
            pre_process=stage == 0,
            post_process=stage == depth - 1,
            position_embedding_type=args.position_embedding_type,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        )
        dist.init_process_group(
            "fake", store=FakeStore(), rank=stage * tensor, world_size=tensor * depth
        )
        try:
            parallel_state.initialize_model_parallel(
                tensor, depth, create_gloo_process_groups=False
            )
            tensor_parallel.model_parallel_cuda_manual_seed(1)
            # The fake backend of torch 2.8 has no all-reduce of tensors without data.
            with torch.device("meta"), mock.patch.object(dist, "all_reduce"):
                if model.kind == "bert":
                    return BertModel(
                        config, 2, bert_layer_local_spec, add_binary_head=True, **given
                    )
                spec = gpt_layer_specs.get_gpt_decoder_block_spec(
                    config, False, normalization=config.normalization
                )
                return GPTModel(config, spec, **given)
        finally:
            tensor_parallel.get_cuda_rng_tracker().reset()
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()

    return build


def count(module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("name", TINY)
def test_parameters_are_those_that_megatron_builds(name, tensor, stage_of):
    model = TINY[name]
    # Megatron has no more of them
    tensor = 1 if model.experts and model.bias else tensor
    built = stage_of(model, tensor)
    layers = built.encoder.layers if model.kind == "bert" else built.decoder.layers
    first = model.without_experts.layer_parameters(tensor)
    each = [first] * model.dense + [model.layer_parameters(tensor)] * (
        model.layers - model.dense
    )
    assert [count(layer) for layer in layers] == each
    assert count(built.embedding) == model.embedding_parameters(tensor)
    assert count(built) == Memory(model, "bf16", True).parameters(
        Plan(tensor, 1, 1, 1, 1), 0, model.layers
    )
    assert tensor > 1 or count(built) == model.parameters()


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize(
    "name", ["gpt", "llama", "qwen2", "bert", "a dense layer and a mixture"]
)
def test_parameters_of_a_stage_are_those_that_megatron_builds(name, tensor, stage_of):
    model = replace(TINY[name], layers=6)
    memory = Memory(TINY[name], "bf16", True)
    for stage in range(3):
        ours = memory.parameters(Plan(tensor, 3, 1, 1, 3), stage, 2)
        assert ours == count(stage_of(model, tensor, 3, stage)), f"stage {stage}"


@pytest.mark.parametrize("tensor", [1, 3, 16])
@pytest.mark.parametrize("vocab", [1, 128, 129, 50257])
def test_the_vocabulary_is_padded_as_megatron_pads_it(vocab, tensor, parse):
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    padded = replace(GPT, vocab=vocab).padded_vocab(tensor)
    assert padded == calculate_padded_vocab_size(vocab, 128, tensor)


@pytest.mark.parametrize("name", TINY)
def test_megatron_reads_the_flags_as_they_are_meant(name, parse):
    model = TINY[name]
    args = parse(model)
    for field, argument in ARGUMENTS.items():
        same = (getattr(args, argument) or 0) == getattr(model, field)
        assert same or field in (
            "groups",
            "vocab",
            *["expert_ffn"] * (not model.experts),
        )
    assert args.max_position_embeddings == model.sequence
    assert (
        args.num_query_groups
        if args.group_query_attention
        else args.num_attention_heads
    ) == model.groups
    assert (args.normalization == "RMSNorm") == model.rms_norm
    assert (args.position_embedding_type == "rope") == model.rotary
    assert args.rotary_base == model.rotary_base
    assert args.use_rope_scaling == model.rope_scaling
    assert args.rope_scaling_factor == model.rope_factor
    assert args.qk_layernorm == model.qk_norm
    assert args.openai_gelu == (model.gelu == "tanh")
    assert (model.gelu == "exact") <= (not args.bias_gelu_fusion)
    assert args.layernorm_epsilon == model.norm_epsilon
    assert args.untie_embeddings_and_output_weights != model.tied
    assert args.add_qkv_bias == (model.bias or model.qkv_bias)
    assert args.moe_router_pre_softmax == model.pre_softmax
    assert args.moe_aux_loss_coeff == model.aux_loss
    assert model.latent == (args.kv_lora_rank if args.multi_latent_attention else 0)
    assert (args.attention_dropout > 0) == (args.hidden_dropout > 0) == model.dropout
    assert args.padded_vocab_size in (None, model.padded_vocab())


# --- by hand
# --------------------------------------------------------------------------------------


def test_operations_by_hand():
    b = 3
    s = 32
    h = 64
    assert GPT.layer_flops(b) == (24 * b * s * h * h, 4 * b * s * s * h)
    assert GPT.layer_flops(b, 4) == (6 * b * s * h * h, b * s * s * h)
    assert GPT.output_flops(b) == 2 * b * s * h * 1024
    assert GPT.output_flops(b, 2) == b * s * h * 1024
    assert TINY["bert"].output_flops(b) - GPT.output_flops(b) == 2 * b * s * h * h
    # 96 B s l h² (1 + s/6h + V/16lh) with recompute is 4/3 of it without, but for the
    # logits (arXiv 2104.04473). A causal mask halves the term of s.
    without = 72 * s * 2 * h * h * (1 + s / (12 * h) + 1024 / (12 * 2 * h))
    assert GPT.sample_flops() == pytest.approx(without, rel=1e-12)


@pytest.mark.parametrize(
    "name", [name for name in PRESETS if re.fullmatch(r"\w+-[\d.]+[bm]", name)]
)
def test_presets_have_the_size_of_their_name(name):
    number, unit = re.fullmatch(r"\w+-([\d.]+)([bm])", name).groups()
    named = float(number) * {"m": 1e6, "b": 1e9}[unit]
    # The paper names a BERT by the size of the GPT with its layers, though its
    # vocabulary is smaller.
    rel = {"bert-355m": 0.055, "bert-2.2b": 0.04}.get(name, 0.03)
    assert PRESETS[name].parameters() == pytest.approx(named, rel=rel)


@pytest.mark.parametrize(
    "name, parameters",
    [
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("deepseek-v2-lite", 15_706_484_224),
    ],
)
def test_mixtures_have_the_published_parameters(name, parameters):
    """The count of transformers."""
    assert PRESETS[name].parameters() == parameters


# --- flags and back
# --------------------------------------------------------------------------------------


def reread(model: Model, *more: str) -> Model:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_model_flags(parser)
    words = [
        *model.flags(),
        "--vocab-size",
        str(model.vocab),
        *["--bert"] * (model.kind == "bert"),
        *more,
    ]
    return model_of(parser.parse_args(words))


@pytest.mark.parametrize(
    "model", [*PRESETS.values(), *TINY.values()], ids=lambda model: model.name
)
def test_flags_round_trip(model):
    assert reread(model) == replace(model, name=model.kind)


def test_what_the_flags_leave_out_is_megatrons_default():
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    shape = "--num-layers 4 --hidden-size 192 --num-attention-heads 6 ".split()
    assert model_of(parser.parse_args(shape)) == Model("gpt", 4, 192, 6)
    # 8h/3, in multiples of 64
    assert model_of(parser.parse_args([*shape, "--swiglu"])).ffn == 512
    assert model_of(parser.parse_args([*shape, "--group-query-attention"])).groups == 1
    assert model_of(parser.parse_args([*shape, "--bert"])).vocab == 30522


# --- Hugging Face's config.json
# --------------------------------------------------------------------------------------


def config(kind: str, *sizes: int, **entries) -> dict:
    names = (
        "num_hidden_layers hidden_size num_attention_heads vocab_size "
        "intermediate_size max_position_embeddings"
    )
    return (
        {"model_type": kind}
        | dict(zip([*names.split(), "num_key_value_heads"], sizes))
        | entries
    )


# transformers' defaults are the published small models
GPT2 = config("gpt2")
BERT_BASE = config("bert")
LLAMA3 = config(
    "llama",
    32,
    4096,
    32,
    128256,
    14336,
    8192,
    8,
    rope_theta=500000.0,
    rms_norm_eps=1e-5,
)
MISTRAL = LLAMA3 | {"model_type": "mistral", "vocab_size": 32000, "rope_theta": 10000.0}
QWEN = dict(rope_theta=1000000.0, tie_word_embeddings=True)
QWEN2_SMALL = config("qwen2", 24, 896, 14, 151936, 4864, 32768, 2, **QWEN)
QWEN3_SMALL = config(
    "qwen3", 28, 1024, 16, 151936, 3072, 40960, 8, head_dim=128, **QWEN
)
LLAMA31_ROPE = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0
)
LLAMA31_ROPE["original_max_position_embeddings"] = 8192


@pytest.fixture
def written(tmp_path):
    def write(config, sequence: int | None = None) -> Model:
        path = tmp_path / "my-model" / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(config))
        return from_hugging_face(path, sequence)

    return write


# The published models' parameters, and those that Megatron's padding of their
# vocabulary adds.
@pytest.mark.parametrize(
    "config, parameters, padding",
    [
        (GPT2, 124_439_808, 47 * 768),
        (BERT_BASE, 110_106_428, 70 * (768 + 1)),  # with both heads
        (LLAMA3, 8_030_261_248, 0),
        (QWEN2_SMALL, 494_032_768, 0),
        (QWEN3_SMALL, 596_049_920, 0),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_published_models_have_their_parameters(config, parameters, padding, written):
    model = written(config)
    assert model.parameters() == parameters + padding
    assert model.name == "my-model"
    assert reread(model).parameters() == model.parameters()


LLAMA_8B = vars(replace(PRESETS["llama-8b"], name="my-model"))
SCALED = LLAMA_8B | {"rope_scaling": True}


@pytest.mark.parametrize(
    "config, fields",
    [
        (
            GPT2 | {"n_inner": 1000, "resid_pdrop": 0.0, "tie_word_embeddings": False},
            dict(ffn=1000, dropout=False),
        ),
        (
            BERT_BASE,
            dict(
                kind="bert",
                vocab=30522,
                sequence=512,
                norm_epsilon=1e-12,
                gelu="exact",
                dropout=True,
            ),
        ),
        (
            LLAMA3 | {"rope_parameters": LLAMA31_ROPE | {"rope_theta": 7.0}},
            SCALED | {"rotary_base": 7},
        ),
        (
            LLAMA3 | {"rope_scaling": LLAMA31_ROPE | {"factor": 32.0}},
            SCALED | {"rope_factor": 32.0},
        ),
        (
            QWEN2_SMALL,
            dict(
                groups=2,
                head_size=64,
                qkv_bias=True,
                tied=True,
                bias=False,
                norm_epsilon=1e-6,
            ),
        ),
        # off unless it is asked for
        (QWEN2_SMALL | {"sliding_window": 4096}, dict(sequence=8192)),
        (MISTRAL | {"sliding_window": 8192}, dict(sequence=8192)),
    ],
    ids=str,
)
def test_entries_of_a_configuration(config, fields, written):
    found = written(config, None if config["model_type"] in ("gpt2", "bert") else 8192)
    assert {name: getattr(found, name) for name in fields} == fields


@pytest.mark.parametrize(
    "config, entry",
    [
        # Llama's is on the projection too
        (LLAMA3 | {"attention_bias": True}, "attention_bias"),
        (MISTRAL | {"sliding_window": 4096}, "sliding_window"),
        (LLAMA3 | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            LLAMA3 | {"rope_scaling": LLAMA31_ROPE | {"low_freq_factor": 2}},
            "low_freq_factor",
        ),
        ({"model_type": "bloom"}, "model_type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_megatron_would_build_as_another_model(config, entry, written):
    with pytest.raises(UserError, match=rf"^--model \S+/config.json.*{entry}"):
        written(config, 8192)


def test_a_sequence_length_that_nobody_gave_is_of_pretraining(
    written, tmp_path, capsys
):
    # learned positions are a part of the model
    assert written(GPT2 | {"n_positions": 8192}).sequence == 8192
    written(QWEN3_SMALL)
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    words = ["--model", str(tmp_path / "my-model")]
    assert (
        model_of(parser.parse_args([*words, "--seq-length", "40960"])).sequence == 40960
    )
    assert not capsys.readouterr().err
    assert model_of(parser.parse_args(words)).sequence == 4096
    assert "--seq-length" in capsys.readouterr().err
