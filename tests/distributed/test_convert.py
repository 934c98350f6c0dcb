"""Hugging Face's models in Megatron: the same logits on any split, and the same bits on
the way back."""

import functools
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from megatron_2bw.base.local_ranks import WorldError, run_world
from megatron_2bw.cli import main
from megatron_2bw.tools.convert import config
from megatron_2bw.tools.convert.families import to_hugging_face
from megatron_2bw.tools.convert.megatron import saved_arguments
from tests.distributed.training import BERT, train

pytestmark = pytest.mark.cpu

BRIDGE = Path(__file__).parents[2] / "build" / "oracles"
CONFIGURATIONS = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text())
DECODERS = ("llama", "mistral", "qwen2", "qwen3")
MODELS = (*DECODERS, "mixtral", "qwen3_moe", "gpt2", "bert", "bert, one head")
RUN = (
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 1e-3 "
    "--eval-iters 0 --eval-interval 9 --mock-data "
    "--attention-dropout 0 --hidden-dropout 0 --num-workers 0 --log-interval 1 "
    "--device cpu --pipeline-schedule 2bw"
)


def made(name: str):
    """The model with random weights, biases and norms."""
    import transformers

    sizes = dict(CONFIGURATIONS[name])
    kind = getattr(transformers, sizes.pop("architecture"))
    torch.manual_seed(3)
    model = kind(kind.config_class(**sizes)).eval()
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

    @functools.cache
    def get(name: str) -> Path:
        path = tmp_path_factory.mktemp(name.replace(",", "").replace(" ", "_"))
        made(name).save_pretrained(path / "hf")
        # for two tensor ranks
        pad = "--make-vocab-size-divisible-by 2"
        convert(f"import {path}/hf --save {path}/ckpt {pad}")
        return path

    return get


def convert(words: str) -> None:
    run_world(1, call, f"convert {words}")


def call(rank: int, words: str) -> None:
    assert main(words.split()) == 0


def command(name: str, checkpoint: Path, flags: str) -> list[str]:
    """The command line that trains a model of the folder of its checkpoint."""
    argv = shlex.split((checkpoint / "model_flags.txt").read_text())
    argv += [*RUN.split(), *flags.split()]
    return [BERT, *argv] if name.startswith("bert") else argv


def tokens() -> torch.Tensor:
    return torch.randint(1001, (2, 32), generator=torch.Generator().manual_seed(5))


def types() -> torch.Tensor:
    return (torch.arange(32) >= 16).long().expand(2, -1)


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
            kinds = None if "--bert-no-binary-head" in argv else types()
            output = model(batch, torch.ones_like(batch), tokentype_ids=kinds)
        else:
            mask = torch.ones(1, 1, 32, 32).triu(1) > 0
            output = model(batch, torch.arange(32).expand(2, -1), mask)
        # an earlier stage, and a GPT, have one tensor
        words, order = output if isinstance(output, tuple) else (output, None)
        return words, lambda out, non_loss_data: (out, order)

    def ask(models, _optimizer):
        models[0].eval()
        run = schedules.get_forward_backward_func()
        with torch.no_grad():
            answers = run(
                forward_step_func=forward,
                data_iterator=None,
                model=models,
                num_microbatches=1,
                seq_length=32,
                micro_batch_size=2,
                forward_only=True,
                collect_non_loss_data=True,
            )
        if mpu.is_pipeline_last_stage():
            ((words, order),) = answers
            found.update(words=gather(words)[..., :1001].clone(), order=order)
        models[0].train()

    run = train(rank, argv, prepare=ask)
    return found, len(run.iterations)


SPLITS = [(name, 2, 1) for name in MODELS]
SPLITS += [(name, 1, 2) for name in ("llama", "gpt2", "bert")]


@pytest.mark.proof("llama-2-1")
@pytest.mark.parametrize("name, stages, tensor", SPLITS)
def test_logits_are_those_of_transformers(name, stages, tensor, folder):
    checkpoint = folder(name) / "ckpt"
    flags = f"--load {checkpoint} --finetune --pipeline-model-parallel-size {stages}"
    flags += f" --tensor-model-parallel-size {tensor}"
    argv = command(name, checkpoint, flags)
    found, iterations = run_world(stages * tensor, logits_of, argv)[-1]
    assert iterations == 3
    inputs = {"token_type_ids": types()} if name.startswith("bert") else {}
    with torch.no_grad():
        answer = made(name)(tokens(), **inputs)
    assert answer[0].abs().max() > 1
    torch.testing.assert_close(found["words"], answer[0], rtol=0, atol=1e-5)
    if name == "bert":
        order = answer.seq_relationship_logits
        torch.testing.assert_close(found["order"], order, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_way_back_gives_the_same_bits(name, folder):
    from transformers import AutoConfig, AutoModel

    there = folder(name) / "hf"
    back = folder(name) / "back"
    like = f"--like {there}" if name == "mistral" else ""
    convert(f"export {folder(name)}/ckpt --out {back} {like}")
    before = load_file(there / "model.safetensors")
    assert same(load_file(back / "model.safetensors"), before)
    expected = AutoConfig.from_pretrained(there)
    config = AutoConfig.from_pretrained(back)
    assert type(config) is type(expected)
    assert config.eos_token_id == expected.eos_token_id or not like
    content = json.loads((back / "config.json").read_text())
    # which readers before transformers 5 lack
    for renamed in ("rope_parameters", "dtype", "num_local_experts"):
        content.pop(renamed, None)
    for found in (config, AutoConfig.for_model(**content)):
        rope = getattr(found, "rope_parameters", {})
        assert getattr(expected, "rope_parameters", {}).items() <= rope.items()
        assert found.dtype == expected.dtype
        experts = getattr(found, "num_experts", 0)
        assert experts == getattr(expected, "num_experts", 0)
    count = AutoModel.from_pretrained(there).num_parameters()
    assert AutoModel.from_pretrained(back).num_parameters() == count


# --- megatron-bridge
# --------------------------------------------------------------------------------------


# what it has; of mixtures those without dense layers
BRIDGED = (*DECODERS, "experts")


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
    for name in BRIDGED:
        convert(f"import {folder(name)}/hf --save {folder(name)}/unpadded")
    program = Path(__file__).with_name("bridge.py")
    words = [BRIDGE / "bin" / "python", program, *map(folder, BRIDGED)]
    run = subprocess.run(words, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    for name in BRIDGED:
        weights, sizes = load(folder(name) / "theirs.pt")
        assert len(weights) > 4 * 6, name
        assert same(load(folder(name) / "ours.pt"), weights), name
        held = load_file(folder(name) / "hf" / "model.safetensors")
        assert same(load(folder(name) / "back.pt"), held), name
        args = vars(saved_arguments(folder(name) / "unpadded" / "release"))
        assert sizes.items() <= args.items(), name


def load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    equal = [torch.equal(ours[name], theirs[name]) for name in ours.keys() & theirs]
    return ours.keys() == theirs.keys() and all(equal)


def test_trained_weights_are_those_that_are_exported(folder, tmp_path):
    """All, and of 2BW the newest; from two stages of 1 and 3 layers."""
    checkpoint = folder("qwen3") / "ckpt"
    flags = f"--load {checkpoint} --finetune --save {tmp_path}/run --save-interval 3"
    flags += (
        " --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tttL"
    )
    runs = run_world(2, train, command("qwen3", checkpoint, flags))
    convert(f"export {tmp_path}/run --out {tmp_path}/hf")
    held = load_file(tmp_path / "hf" / "model.safetensors")
    common = config.read(tmp_path / "hf" / "config.json", 32)
    trained = {}
    for run in runs:
        for name, weight in run.weights.items():
            parts = to_hugging_face(common.family, name, weight, common.model)
            trained |= zip(common.family.sources(name), parts)
    assert same(trained, held) and not same(trained, made("qwen3").state_dict())


def test_what_was_not_written_to_its_end_is_not_loaded(tmp_path):
    """Here the last tensor is not a number. The same folder takes the whole model
    afterwards."""
    made("llama").save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    held = load_file(file)
    broken = held["lm_head.weight"] * torch.nan
    save_file(held | {"lm_head.weight": broken}, file)
    words = f"import {tmp_path}/hf --save {tmp_path}/ckpt"
    with pytest.raises(WorldError, match="the tensor lm_head.weight holds NaN"):
        convert(words)
    tracker = tmp_path / "ckpt" / "latest_checkpointed_iteration.txt"
    release = tmp_path / "ckpt" / "release"
    assert release.is_dir() and not (release / "metadata.json").exists()
    assert not tracker.exists()
    save_file(held, file)
    convert(words)
    assert tracker.read_text() == "release"


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
    file = tmp_path / "hf" / "model.safetensors"
    held = load_file(file)
    held[tensor] = model.state_dict()[tensor].clone()
    save_file(held, file)
    convert(f"import {tmp_path}/hf --save {tmp_path}/same")
    held[tensor][-1] += 1
    save_file(held, file)
    with pytest.raises(
        WorldError, match=f"the tensor {tensor} differs from {original},"
    ):
        convert(f"import {tmp_path}/hf --save {tmp_path}/other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "bert"])
def test_adapters_are_those_of_peft(name, folder, tmp_path):
    """peft's model with them, and the merged one, have the outputs of Megatron's."""
    from peft import PeftModel

    there = folder(name)
    run = tmp_path / "run"
    flags = f"--lora-rank 4 --lora-base {there}/ckpt --pipeline-model-parallel-size 2"
    argv = command(name, there / "ckpt", flags)
    run_world(2, train, [*argv, *f"--lr 0.1 --save {run} --save-interval 3".split()])
    argv += ["--load", str(run), "--finetune"]
    found, _ = run_world(2, logits_of, argv)[-1]
    convert(f"export {run} --out {tmp_path}/peft --like {there}/hf")
    convert(f"export {run} --out {tmp_path}/merged --merge")
    inputs = {"token_type_ids": types()} if name == "bert" else {}
    base = made(name)
    before = base(tokens(), **inputs)[0]
    adapted = PeftModel.from_pretrained(base, tmp_path / "peft").eval()
    assert (before - found["words"]).abs().max() > 0.1
    for model in (type(base).from_pretrained(tmp_path / "merged"), adapted):
        answer = model(tokens(), **inputs)[0]
        torch.testing.assert_close(answer, found["words"], rtol=0, atol=2e-5)
