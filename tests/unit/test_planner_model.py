"""The planner's models: their parameters are those of Megatron's own modules, their flags mean them, files are read."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from unittest import mock

import pytest

from megatron_2bw import cpu
from megatron_2bw.errors import UserError
from megatron_2bw.models.hugging_face import from_hugging_face
from megatron_2bw.models.inputs import add_model_flags, model_of
from megatron_2bw.models.model import PRESETS, Model, preset
from megatron_2bw.models.plan import Plan
from megatron_2bw.planner.cost.memory import Memory

GPT = Model("gpt", 2, 64, 4, vocab=1000, sequence=32)
LLAMA = Model(
    "llama",
    2,
    64,
    8,
    vocab=1000,
    sequence=32,
    ffn=192,
    groups=4,
    gated=True,
    rms_norm=True,
    rotary=True,
    rotary_base=500000,
    tied=False,
    bias=False,
    dropout=False,
)
QWEN2 = replace(LLAMA, name="qwen2", qkv_bias=True, tied=True)
BERT = replace(GPT, name="bert", kind="bert")
TINY = {
    model.name: model
    for model in (
        GPT,
        LLAMA,
        QWEN2,
        BERT,
        replace(GPT, name="gpt untied", tied=False),
        replace(GPT, name="gpt gated with biases", gated=True, ffn=128),
        replace(GPT, name="gpt with both biases", qkv_bias=True),
        replace(GPT, name="gpt with wide heads", head_size=32),
        replace(GPT, name="gpt with 256 tokens", vocab=256),
        replace(LLAMA, name="llama with narrow heads", head_size=4),
        replace(LLAMA, name="llama with scaled positions", rope_scaling=True, norm_epsilon=1e-6),
        replace(LLAMA, name="llama whose ffn is 4h", ffn=256),
        replace(LLAMA, name="qwen3", head_size=16, qk_norm=True),
        replace(LLAMA, name="llama 3.2", rope_scaling=True, rope_factor=32.0),
        replace(GPT, name="gpt with tanh", gelu="tanh"),
        replace(GPT, name="gpt with the exact gelu", gelu="exact"),
        replace(BERT, name="bert untied", tied=False),
    )
}
RUN = (
    "--mock-data --tokenizer-type NullTokenizer --micro-batch-size 1 --train-iters 1 --lr 1 --min-lr 0 "
    "--transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion "
    "--no-rope-fusion --no-bias-dropout-fusion --use-cpu-initialization"
).split()


# --- against Megatron's modules --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parse():
    """Megatron's parser and checks, on a host that answers for CUDA."""
    was_installed = cpu.installed()
    cpu.install()
    from megatron.training.arguments import add_megatron_arguments, validate_args

    from megatron_2bw import guard
    from megatron_2bw.mcore import patches

    undo = guard.apply([patch for patch in patches.for_cpu() if patch.name == "_set_cuda_rng_state"])
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))

    def parsed(model: Model, tensor: int = 1, depth: int = 1) -> argparse.Namespace:
        sizes = ["--tensor-model-parallel-size", str(tensor), "--pipeline-model-parallel-size", str(depth)]
        args = parser.parse_args([*model.flags(), *RUN, "--vocab-size", str(model.vocab), *sizes])
        args.rank, args.world_size = 0, tensor * depth
        validate_args(args)
        return args

    yield parsed
    undo()
    if not was_installed:
        cpu.uninstall()


@pytest.fixture
def stage_of(parse):
    """Megatron's modules of a stage, on one of its tensor ranks, as tensors without data."""
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
        vocab = calculate_padded_vocab_size(model.vocab, args.make_vocab_size_divisible_by, tensor)
        given = dict(
            vocab_size=vocab,
            max_sequence_length=args.max_position_embeddings,
            pre_process=stage == 0,
            post_process=stage == depth - 1,
            position_embedding_type=args.position_embedding_type,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        )
        dist.init_process_group("fake", store=FakeStore(), rank=stage * tensor, world_size=tensor * depth)
        try:
            parallel_state.initialize_model_parallel(tensor, depth, create_gloo_process_groups=False)
            tensor_parallel.model_parallel_cuda_manual_seed(1)
            # The fake backend of torch 2.8 has no all-reduce of tensors without data.
            with torch.device("meta"), mock.patch.object(dist, "all_reduce"):
                if model.kind == "bert":
                    return BertModel(config, 2, bert_layer_local_spec, add_binary_head=True, **given)
                spec = gpt_layer_specs.get_gpt_layer_local_spec(
                    qk_layernorm=config.qk_layernorm, normalization=config.normalization
                )
                return GPTModel(config, spec, **given)
        finally:
            tensor_parallel.get_cuda_rng_tracker().reset()
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()

    return build


def count(module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", TINY)
def test_parameters_are_those_that_megatron_builds(name, stage_of):
    model = TINY[name]
    built = stage_of(model)
    assert count(built) == model.parameters()
    layers = built.encoder.layers if model.kind == "bert" else built.decoder.layers
    assert [count(layer) for layer in layers] == [model.layer_parameters()] * model.layers
    assert count(built.embedding) == model.embedding_parameters()


@pytest.mark.parametrize("tensor", [4])
@pytest.mark.parametrize("name", TINY)
def test_parameters_of_a_tensor_rank_are_those_that_megatron_builds(name, tensor, stage_of):
    model = TINY[name]
    built = stage_of(model, tensor)
    layers = built.encoder.layers if model.kind == "bert" else built.decoder.layers
    assert count(layers[0]) == model.layer_parameters(tensor)
    assert count(built.embedding) == model.embedding_parameters(tensor)
    assert count(built) == Memory(model, "bf16", True).parameters(Plan(tensor, 1, 1, 1, 1), 0, model.layers)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("model", [GPT, LLAMA, QWEN2, BERT], ids=lambda model: model.name)
def test_parameters_of_a_stage_are_those_that_megatron_builds(model, tensor, stage_of):
    model, memory = replace(model, layers=6), Memory(model, "bf16", True)
    for stage in range(3):
        ours = memory.parameters(Plan(tensor, 3, 1, 1, 3), stage, 2)
        assert ours == count(stage_of(model, tensor, 3, stage)), f"stage {stage}"


@pytest.mark.parametrize("tensor", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("vocab", [1, 127, 128, 129, 1024, 30522, 50257, 128256])
def test_the_vocabulary_is_padded_as_megatron_pads_it(vocab, tensor, parse):
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    padded = replace(GPT, vocab=vocab).padded_vocab(tensor)
    assert padded == calculate_padded_vocab_size(vocab, 128, tensor) and padded % (128 * tensor) == 0
    assert vocab <= padded < vocab + 128 * tensor


@pytest.mark.parametrize("name", TINY)
def test_megatron_reads_the_flags_as_they_are_meant(name, parse):
    model = TINY[name]
    args = parse(model)
    assert (args.num_layers, args.hidden_size, args.num_attention_heads, args.seq_length) == (
        model.layers,
        model.hidden,
        model.heads,
        model.sequence,
    )
    assert args.max_position_embeddings == model.sequence
    assert (args.ffn_hidden_size, args.kv_channels) == (model.ffn, model.head_size)
    assert (args.num_query_groups if args.group_query_attention else args.num_attention_heads) == model.groups
    assert args.swiglu == model.gated and (args.normalization == "RMSNorm") == model.rms_norm
    assert (args.position_embedding_type == "rope") == model.rotary
    assert args.rotary_base == model.rotary_base and args.use_rope_scaling == model.rope_scaling
    assert args.rope_scaling_factor == model.rope_factor and args.qk_layernorm == model.qk_norm
    assert args.openai_gelu == (model.gelu == "tanh") and (model.gelu == "exact") <= (not args.bias_gelu_fusion)
    assert args.layernorm_epsilon == model.norm_epsilon
    assert args.untie_embeddings_and_output_weights != model.tied
    assert args.add_bias_linear == model.bias and args.add_qkv_bias == (model.bias or model.qkv_bias)
    assert (args.attention_dropout > 0) == (args.hidden_dropout > 0) == model.dropout
    assert args.padded_vocab_size in (None, model.padded_vocab())


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_a_layers_parameters_by_hand():
    h = 64
    assert replace(GPT, layers=1).layer_parameters() == 12 * h * h + 13 * h  # 4h² + 8h², 4h + 5h of biases, 4h of norms
    assert GPT.layer_parameters(4) == (12 * h * h + 7 * h) / 4 + 6 * h  # 3h and 4h of biases are divided
    assert LLAMA.layer_parameters() == 3 * h * h + 3 * h * 192 + 2 * h  # Q, O, half of K and V; SwiGLU; two norms
    assert QWEN2.layer_parameters() - LLAMA.layer_parameters() == 2 * h
    assert GPT.embedding_parameters() == 1024 * h + 32 * h and GPT.output_parameters() == 1024 * h + 2 * h
    assert LLAMA.embedding_parameters() == 1024 * h and LLAMA.output_parameters() == 1024 * h + h
    assert BERT.embedding_parameters() - GPT.embedding_parameters() == 2 * h


def test_operations_by_hand():
    b, s, h = 3, 32, 64
    assert GPT.layer_flops(b) == (24 * b * s * h * h, 4 * b * s * s * h)
    assert GPT.layer_flops(b, 4) == (6 * b * s * h * h, b * s * s * h)
    assert GPT.output_flops(b) == 2 * b * s * h * 1024 and GPT.output_flops(b, 2) == b * s * h * 1024
    assert BERT.output_flops(b) - GPT.output_flops(b) == 2 * b * s * h * h
    # 96 B s l h² (1 + s/6h + V/16lh) with recompute is 4/3 of it without, but for the logits (arXiv 2104.04473). A
    # causal mask halves the term of s.
    without = 72 * s * 2 * h * h * (1 + s / (12 * h) + 1024 / (12 * 2 * h))
    assert GPT.sample_flops() == pytest.approx(without, rel=1e-12)
    for model in TINY.values():
        for tensor in (1, 2):
            sides = model.matrix_sides(tensor)
            assert sum(i * o for i, o in sides) == model.matrix_parameters() / tensor


@pytest.mark.parametrize("name", [name for name in PRESETS if name[-1] in "bm"])
def test_presets_have_the_size_of_their_name(name):
    number, unit = re.fullmatch(r"\w+-([\d.]+)([bm])", name).groups()
    named = float(number) * {"m": 1e6, "b": 1e9}[unit]
    # The paper names a BERT by the size of the GPT with its layers, though its vocabulary is smaller.
    rel = {"bert-355m": 0.055, "bert-2.2b": 0.04}.get(name, 0.03)
    assert PRESETS[name].parameters() == pytest.approx(named, rel=rel)


def test_the_other_presets_are_bert_large_with_more_layers():
    large, rest = PRESETS["bert-24"], {name: PRESETS[name] for name in ("bert-48", "bert-192")}
    assert (large.layers, large.hidden, large.heads, large.kind) == (24, 1024, 16, "bert")
    assert large.parameters() == pytest.approx(340e6, rel=0.03)
    assert rest == {name: replace(large, name=name, layers=int(name[5:])) for name in rest}


def test_a_preset_by_name():
    assert preset("2.2b") is PRESETS["gpt-2.2b"] and preset("gpt-2.2b", 2048).sequence == 2048
    with pytest.raises(UserError, match="^--model gpt-2b: not one of gpt-355m, .*, and no file of that name$"):
        preset("gpt-2b")


@pytest.mark.parametrize("name, count", [("0.6b", 596_049_920), ("8b", 8_190_735_360), ("32b", 32_762_123_264)])
def test_the_parameters_of_qwen3_are_those_of_the_published_models(name, count):
    assert PRESETS[f"qwen3-{name}"].parameters() == count


# --- flags and back --------------------------------------------------------------------------------------------------


def reread(model: Model, *more: str) -> Model:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_model_flags(parser)
    words = [*model.flags(), "--vocab-size", str(model.vocab), *["--bert"] * (model.kind == "bert"), *more]
    return model_of(parser.parse_args(words))


@pytest.mark.parametrize("model", [*PRESETS.values(), *TINY.values()], ids=lambda model: model.name)
def test_flags_round_trip(model):
    meant = replace(model, qkv_bias=False) if model.bias else model  # with all biases the flag says nothing
    assert reread(model) == replace(meant, name=model.kind)


def test_what_the_flags_leave_out_is_megatrons_default():
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    shape = "--num-layers 4 --hidden-size 192 --num-attention-heads 6 ".split()
    assert model_of(parser.parse_args(shape)) == Model("gpt", 4, 192, 6)
    assert model_of(parser.parse_args([*shape, "--swiglu"])).ffn == 512  # 8h/3, in multiples of 64
    assert model_of(parser.parse_args([*shape, "--group-query-attention"])).groups == 1
    assert model_of(parser.parse_args([*shape, "--bert"])).vocab == 30522


@pytest.mark.parametrize(
    "changes, flag",
    [
        ({"layers": 0}, "--num-layers must be positive, not 0"),
        ({"sequence": 10**12}, "--seq-length 1000000000000: it must be below 1e+12"),
        ({"hidden": -64}, "--hidden-size must be positive"),
        ({"heads": 0}, "--num-attention-heads must be positive"),
        ({"vocab": 0}, "--vocab-size must be positive"),
        ({"sequence": 0}, "--seq-length must be positive"),
        ({"ffn": -1}, "--ffn-hidden-size must be positive"),
        ({"groups": -1}, "--num-query-groups must be positive"),
        ({"head_size": -16}, "--kv-channels must be positive"),
        (
            {"heads": 5, "groups": 5, "head_size": 0},
            "--hidden-size 64 is not a multiple of --num-attention-heads 5; give --kv-channels",
        ),
        ({"groups": 3}, "--num-attention-heads 4 is not a multiple of --num-query-groups 3"),
    ],
    ids=str,
)
def test_models_that_cannot_be(changes, flag):
    with pytest.raises(UserError, match=f"^{re.escape(flag)}") as error:
        replace(GPT, **changes)
    assert "\n" not in str(error.value)


# --- Hugging Face's config.json --------------------------------------------------------------------------------------

GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
BERT_BASE = {
    "model_type": "bert",
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "vocab_size": 30522,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "hidden_dropout_prob": 0.1,
}
LLAMA3 = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
}
LLAMA31_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QWEN2_SMALL = {
    "model_type": "qwen2",
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
MISTRAL = LLAMA3 | {"model_type": "mistral", "vocab_size": 32000, "rope_theta": 10000.0}
QWEN3_SMALL = {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "head_dim": 128,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "attention_bias": False,
}


@pytest.fixture
def written(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()

    def write(config) -> Model:
        path = folder / "config.json"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return from_hugging_face(path)

    return write


# The published models' parameters, and those that Megatron's padding of their vocabulary adds.
@pytest.mark.parametrize(
    "config, parameters, padding",
    [
        pytest.param(GPT2, 124_439_808, 47 * 768, id="gpt2"),
        pytest.param(BERT_BASE, 110_106_428, 70 * (768 + 1), id="bert-base"),  # with both heads
        pytest.param(LLAMA3, 8_030_261_248, 0, id="llama-3-8b"),
        pytest.param(MISTRAL, 7_241_732_096, 0, id="mistral-7b"),
        pytest.param(QWEN2_SMALL, 494_032_768, 0, id="qwen2-0.5b"),
    ],
)
def test_published_models_have_their_parameters(config, parameters, padding, written):
    model = written(config)
    assert model.parameters() == parameters + padding
    assert model.name == "my-model"
    assert reread(model).parameters() == model.parameters()


def test_the_norms_of_qwen3s_queries_and_keys_are_counted_or_refused(written):
    try:
        model = written(QWEN3_SMALL)
    except UserError:
        return  # what Megatron would not build the same way
    assert model.parameters() == 596_049_920 and "--qk-layernorm" in model.flags()


@pytest.mark.parametrize("bias", ["attention_bias", "mlp_bias"])
def test_biases_that_megatron_has_no_flag_for_are_refused(bias, written):
    """Llama's attention_bias is on the projection too, where --add-qkv-bias puts none; Megatron has no --mlp-bias."""
    with pytest.raises(UserError, match=bias):
        written(LLAMA3 | {bias: True})


def test_entries_of_each_kind(written):
    gpt2 = written(GPT2)
    assert gpt2 == Model("my-model", 12, 768, 12, vocab=50257, sequence=1024, gelu="tanh")
    assert written(GPT2 | {"n_inner": 1000}).ffn == 1000 and written(GPT2 | {"n_inner": None}).ffn == 3072
    assert not written(GPT2 | {"resid_pdrop": 0.0}).dropout
    assert not written(GPT2 | {"tie_word_embeddings": False}).tied
    bert = Model("my-model", 12, 768, 12, vocab=30522, sequence=512, kind="bert", norm_epsilon=1e-12, gelu="exact")
    assert written(BERT_BASE) == bert
    assert not written(BERT_BASE | {"hidden_dropout_prob": 0}).dropout
    assert written(LLAMA3) == replace(PRESETS["llama-8b"], name="my-model")
    qwen2 = written(QWEN2_SMALL)
    assert (qwen2.groups, qwen2.head_size, qwen2.qkv_bias, qwen2.tied, qwen2.bias) == (2, 64, True, True, False)
    assert written(LLAMA3 | {"head_dim": 64}).query_size == 2048
    assert written(LLAMA3 | {"num_key_value_heads": None}).groups == 32
    newer = {name: entry for name, entry in LLAMA3.items() if name != "rope_theta"}
    assert written(newer | {"rope_parameters": {"rope_theta": 77.0}}).rotary_base == 77


def flag_of(model: Model, flag: str) -> str | None:
    words = model.flags()
    return words[words.index(flag) + 1] if flag in words else None


@pytest.mark.parametrize(
    "config, entry, default",
    [
        (GPT2, "layer_norm_epsilon", 1e-5),
        (BERT_BASE, "layer_norm_eps", 1e-12),
        (LLAMA3, "rms_norm_eps", 1e-6),
        (MISTRAL, "rms_norm_eps", 1e-6),
        (QWEN2_SMALL, "rms_norm_eps", 1e-6),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)
def test_the_norms_epsilon(config, entry, default, written):
    """Where the entry is missing, it is transformers' default for the kind of model."""
    assert written(config | {entry: None}).norm_epsilon == default
    model = written(config | {entry: 3e-6})
    assert model.norm_epsilon == 3e-6 and flag_of(model, "--norm-epsilon") == "3e-06"
    assert flag_of(written(config | {entry: 1e-5}), "--norm-epsilon") is None  # Megatron's default


@pytest.mark.parametrize(
    "scaled",
    [
        {"rope_scaling": LLAMA31_ROPE},
        {"rope_scaling": {"type" if name == "rope_type" else name: entry for name, entry in LLAMA31_ROPE.items()}},
        {"rope_parameters": LLAMA31_ROPE | {"rope_theta": 500000.0}, "rope_theta": None},
        {"rope_parameters": LLAMA31_ROPE, "rope_scaling": LLAMA31_ROPE},
    ],
    ids=["rope_scaling", "type", "rope_parameters", "both"],
)
def test_llama_31s_rotary_positions(scaled, written):
    model = written(LLAMA3 | {"max_position_embeddings": 131072} | scaled)
    assert model == replace(written(LLAMA3), sequence=131072, rope_scaling=True)
    assert "--use-rope-scaling" in model.flags() and model.rotary_base == 500000


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 500000}},
        {"rope_parameters": {"rope_theta": 500000, "rope_type": "default"}, "rope_theta": None},
    ],
    ids=str,
)
def test_rotary_positions_without_scaling(config, written):
    assert written(LLAMA3 | config) == written(LLAMA3)
    assert "--use-rope-scaling" not in written(LLAMA3).flags()


def test_a_window_as_long_as_the_sequence_is_none(written, tmp_path):
    for entries in (
        {"sliding_window": None},
        {"sliding_window": 8192},
        {"sliding_window": 9000},
        {"sliding_window": 4096, "use_sliding_window": False},
    ):
        assert written(MISTRAL | entries) == written(MISTRAL)
    assert written(QWEN2_SMALL | {"sliding_window": 4096}) == written(QWEN2_SMALL)  # off unless it is asked for
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL | {"sliding_window": 4096}))
    assert from_hugging_face(tmp_path / "config.json", 4096).sequence == 4096


@pytest.mark.parametrize(
    "config",
    [
        *(GPT2 | {"activation_function": name} for name in ("gelu_new", "gelu_pytorch_tanh", None)),
        BERT_BASE | {"hidden_act": "gelu"},
        LLAMA3 | {"hidden_act": "silu"},
        QWEN2_SMALL | {"hidden_act": "silu"},
    ],
    ids=lambda config: f"{config['model_type']} {config.get('hidden_act', config.get('activation_function'))}",
)
def test_activations_that_megatron_has(config, written):
    kept = {name: entry for name, entry in config.items() if name not in ("hidden_act", "activation_function")}
    assert written(config) == written(kept)


@pytest.mark.parametrize(
    "config, entry", [(GPT2, "activation_function"), (BERT_BASE, "hidden_act")], ids=["gpt2", "bert"]
)
def test_both_forms_of_gelu(config, entry, written):
    for name, flag in (("gelu", "--no-bias-gelu-fusion"), ("gelu_new", "--openai-gelu")):
        assert set(written(config | {entry: name}).flags()) & {"--no-bias-gelu-fusion", "--openai-gelu"} == {flag}


def test_llama_32s_factor(written):
    model = written(LLAMA3 | {"rope_scaling": LLAMA31_ROPE | {"factor": 32.0}})
    assert model == replace(written(LLAMA3), rope_scaling=True, rope_factor=32.0)
    assert flag_of(model, "--rope-scaling-factor") == "32"


def test_qwen3(written):
    """A norm of each head's query and key, no biases."""
    model = written(LLAMA3 | {"model_type": "qwen3", "head_dim": 128})
    assert model == replace(written(LLAMA3), qk_norm=True) and "--qk-layernorm" in model.flags()


@pytest.mark.parametrize(
    "config, words",
    [
        (GPT2 | {"activation_function": "relu"}, "the entry 'activation_function' must be gelu or gelu_new or "),
        (BERT_BASE | {"hidden_act": "silu"}, "the entry 'hidden_act' must be gelu or gelu_new or "),
        (LLAMA3 | {"hidden_act": "gelu"}, "the entry 'hidden_act' must be silu, which Megatron has, not 'gelu'"),
        (MISTRAL | {"hidden_act": "relu"}, "the entry 'hidden_act' must be silu"),
        (QWEN2_SMALL | {"hidden_act": ["silu"]}, "the entry 'hidden_act' must be silu"),
        (
            MISTRAL | {"sliding_window": 4096},
            "the entry 'sliding_window' is 4096, less than the sequence's 8192 tokens",
        ),
        (QWEN2_SMALL | {"sliding_window": 4096, "use_sliding_window": True}, "the entry 'sliding_window' is 4096"),
        (LLAMA3 | {"rope_parameters": LLAMA31_ROPE | {"factor": 0}}, "the entry 'rope_parameters.factor' must be posi"),
        (LLAMA3 | {"rope_scaling": {"rope_type": "llama3"}}, "the entry 'rope_scaling.factor' must be positive"),
        (
            LLAMA3 | {"rope_scaling": LLAMA31_ROPE | {"low_freq_factor": 2}},
            "the entry 'rope_scaling.low_freq_factor' must be 1, as in Megatron, not 2",
        ),
        (
            LLAMA3 | {"rope_scaling": LLAMA31_ROPE | {"original_max_position_embeddings": 4096}},
            "the entry 'rope_scaling.original_max_position_embeddings' must be 8192",
        ),
        (LLAMA3 | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "the entry 'rope_scaling' is of type 'linear'"),
        (
            QWEN2_SMALL | {"rope_scaling": {"rope_type": "yarn", "factor": 4}},
            "the entry 'rope_scaling' is of type 'yarn'",
        ),
        (LLAMA3 | {"rope_parameters": {"rope_type": "dynamic"}}, "the entry 'rope_parameters' is of type 'dynamic'"),
        (LLAMA3 | {"rope_scaling": 8.0}, "the entry 'rope_scaling' must be null or an object, not 8.0"),
        (LLAMA3 | {"rope_theta": 10000.5}, "the entry 'rope_theta' must be a whole number"),
        (LLAMA3 | {"hidden_size": 10**400}, "the entry 'hidden_size' must be a whole number, not 1000"),
        (LLAMA3 | {"rms_norm_eps": float("nan")}, "the entry 'rms_norm_eps' must be a number, not nan"),
        (LLAMA3 | {"rms_norm_eps": "1e-5"}, "the entry 'rms_norm_eps' must be a number, not '1e-5'"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:40],
)
def test_what_megatron_would_build_as_another_model(config, words, written):
    with pytest.raises(UserError, match=rf"^--model \S+/config.json: {re.escape(words)}") as error:
        written(config)
    assert "\n" not in str(error.value)


def test_another_sequence_length(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    assert from_hugging_face(tmp_path / "config.json", 256).sequence == 256


@pytest.mark.parametrize(
    "config, words, expected",
    [
        ({"max_position_embeddings": 131072}, [], 4096),
        ({"max_position_embeddings": 4096}, [], 4096),
        ({"max_position_embeddings": 4097}, [], 4096),
        ({"max_position_embeddings": 2048}, [], 2048),
        ({"max_position_embeddings": 131072}, ["--seq-length", "131072"], 131072),
        (MISTRAL | {"max_position_embeddings": 32768, "sliding_window": 4096}, [], 4096),
        (GPT2 | {"n_positions": 8192}, [], 8192),  # learned positions are a part of the model
    ],
    ids=lambda value: "" if isinstance(value, list) else str(value)[-60:],
)
def test_a_sequence_length_that_nobody_gave_is_of_pretraining(config, words, expected, tmp_path, capsys):
    config = config if "model_type" in config else QWEN3_SMALL | config
    (tmp_path / "config.json").write_text(json.dumps(config))
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    assert model_of(parser.parse_args(["--model", str(tmp_path), *words])).sequence == expected
    shortened = not words and config.get("max_position_embeddings", 0) > 4096
    assert capsys.readouterr().err.count("--seq-length") == shortened


NEEDED = [
    *((GPT2, entry) for entry in GPT2 if entry != "model_type"),
    *((BERT_BASE, entry) for entry in BERT_BASE if entry not in ("model_type", "hidden_dropout_prob")),
    *(
        (LLAMA3, entry)
        for entry in LLAMA3
        if entry
        not in (
            "model_type",
            "num_key_value_heads",
            "rope_theta",
            "tie_word_embeddings",
            "attention_bias",
            "rms_norm_eps",
        )
    ),
]


@pytest.mark.parametrize("config, entry", NEEDED, ids=[f"{config['model_type']} {entry}" for config, entry in NEEDED])
def test_missing_entries(config, entry, written):
    left = {name: value for name, value in config.items() if name != entry}
    with pytest.raises(UserError, match=rf"^--model \S+/config.json: the entry '{entry}' is missing$"):
        written(left)


@pytest.mark.parametrize(
    "config, words",
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported; use gpt2, bert"),
        ({}, "model_type None is not supported"),
        ([1], "model_type None is not supported"),
        ("{", "not a readable JSON file"),
        ("", "not a readable JSON file"),
        ({"model_type": ["gpt2"]}, "is not supported"),
        (GPT2 | {"n_layer": "12"}, "n_layer"),
        (GPT2 | {"n_layer": None}, "n_layer"),
        (GPT2 | {"n_layer": 2.5}, "n_layer"),
        (LLAMA3 | {"hidden_size": [4096]}, "hidden_size"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_files_that_cannot_be_used(config, words, written):
    with pytest.raises(UserError) as error:
        written(config)
    line = str(error.value)
    assert line.startswith("--model ") and words in line and "\n" not in line


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"^--model \S+/config.json: not a readable JSON file"):
        from_hugging_face(tmp_path / "config.json")
