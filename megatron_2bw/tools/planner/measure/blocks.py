"""Measures and writes a profile: the times of one Megatron block, the output layer and
the optimizer's step.

Invariant: all timed objects are of Megatron's own classes, constructed and stepped as
in its training loop. Only the functions that measure import torch and Megatron.
"""

import argparse
import contextlib
import gc
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import partial
from itertools import pairwise
from typing import Any

from megatron_2bw.base.command_line import TYPES, parser_of
from megatron_2bw.base.errors import Parser, UserError, file_errors
from megatron_2bw.tools.planner.descriptions.inputs import add_model_flags, numbers
from megatron_2bw.tools.planner.descriptions.model import Model
from megatron_2bw.tools.planner.descriptions.profile import MEASURED, BlockTime, Profile

# discarded rounds; a GPU's clocks take a while to rise
WARM_UP = {"cpu": 2, "cuda": 10}


def measure_block(
    model: Model,
    precision: str,
    microbatches: Iterable[int],
    device: str,
    repeats: int = 10,
) -> Profile:
    """The profile of `model`'s layer and output layer on this process's cpu or cuda
    device.

    The layer is a middle stage with one layer, and the output layer a last stage
    without layers. Both are Megatron's GPTModel in its DistributedDataParallel, which
    accumulates gradients as in training. BERT's layers are Megatron's local ones with a
    padding mask; its output layer is approximated by GPT's. Microbatches that exceed the
    memory are omitted; UserError if the smallest one does.
    """
    import torch
    from megatron.core import __version__

    engine = (
        device == "cuda"
        and model.kind != "bert"
        and importlib.util.find_spec("transformer_engine")
    )
    implementation = "transformer_engine" if engine else "local"
    sizes = sorted(set(microbatches))
    found = {"layer": (), "output layer": ()}
    with _alone(device):
        for name in found:
            stage = _stage(model, precision, device, implementation, name != "layer")
            found[name] = _sweep(name, stage, model, sizes, device, repeats)
            if name == "layer":
                step, optimizer = _time_optimizer(stage, precision, device, repeats)
            del stage
            gc.collect()  # Megatron's hooks and buffers form reference cycles
    shape = {
        field.name: getattr(model, field.name)
        for field in fields(Profile)
        if hasattr(model, field.name)
    }
    return Profile(
        torch.cuda.get_device_name() if device == "cuda" else "cpu",
        precision,
        model.kind,
        **shape,
        blocks=found["layer"],
        output=found["output layer"],
        optimizer_seconds_per_parameter=step,
        optimizer=optimizer,
        threads=torch.get_num_threads(),
        made_with=(
            f"torch {torch.__version__}, megatron-core {__version__}, "
            f"{implementation} layers"
        ),
    )


@contextlib.contextmanager
def _alone(device: str) -> Iterator[None]:
    """torch's default process group and Megatron's parallel state of this process
    alone, until the block ends."""
    import torch.distributed as dist

    from megatron_2bw.mcore import cpu, patches, rebinding

    with contextlib.ExitStack() as undo:
        if device == "cpu" and not cpu.installed():
            cpu.install()
            undo.callback(cpu.uninstall)
        if device == "cpu":
            undo.callback(
                rebinding.apply(
                    [
                        patch
                        for patch in patches.for_cpu()
                        if patch.name == "_set_cuda_rng_state"
                    ]
                )
            )
        from megatron.core import parallel_state, tensor_parallel

        backend = "gloo" if device == "cpu" else "nccl"
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        undo.callback(dist.destroy_process_group)
        undo.callback(parallel_state.destroy_model_parallel)
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        undo.callback(tensor_parallel.get_cuda_rng_tracker().reset)
        yield


def _stage(
    model: Model, precision: str, device: str, implementation: str, last: bool
) -> Any:
    """A pipeline stage as in Megatron's training: a middle one with one layer, or the
    last one without layers."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer.transformer_block import (
        LayerNormImpl,
        TransformerBlockSubmodules,
    )

    config = _config(model, precision, device, implementation)
    if last:
        spec = TransformerBlockSubmodules(layer_specs=[], layer_norm=LayerNormImpl)
    elif model.kind == "bert":
        spec = bert_layer_local_spec
    elif implementation == "local":
        spec = gpt_layer_specs.get_gpt_layer_local_spec(
            normalization=config.normalization
        )
    else:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    stage = GPTModel(
        config,
        spec,
        model.padded_vocab(1),
        model.sequence,
        pre_process=False,
        post_process=last,
        position_embedding_type="rope" if model.rotary else "learned_absolute",
        rotary_base=model.rotary_base,
    )
    stage = stage.to(device=device, dtype=config.params_dtype)
    return DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=precision == "bf16"),
        stage,
    )


def _config(model: Model, precision: str, device: str, implementation: str) -> Any:
    """Megatron's configuration, with the fusions that are on by default and available
    on this machine."""
    import torch
    from megatron.core.transformer import TransformerConfig

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[
        precision
    ]
    gpu = device == "cuda"
    dropout = 0.1 if model.dropout else 0.0

    def compiled(module: str) -> bool:  # of Apex
        return gpu and importlib.util.find_spec(module) is not None

    return TransformerConfig(
        num_layers=1,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.groups,
        kv_channels=model.head_size,
        ffn_hidden_size=model.ffn,
        gated_linear_unit=model.gated,
        activation_func=torch.nn.functional.silu
        if model.gated
        else torch.nn.functional.gelu,
        normalization="RMSNorm" if model.rms_norm else "LayerNorm",
        add_bias_linear=model.bias,
        add_qkv_bias=model.bias or model.qkv_bias,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=not gpu,
        attention_softmax_in_fp32=False,
        transformer_impl=implementation,
        bias_activation_fusion=gpu and (model.gated or model.bias),
        bias_dropout_fusion=gpu,
        masked_softmax_fusion=compiled("scaled_masked_softmax_cuda"),
        gradient_accumulation_fusion=compiled("fused_weight_gradient_mlp_cuda"),
    )


def _sweep(
    name: str, stage: Any, model: Model, sizes: list[int], device: str, repeats: int
) -> tuple[BlockTime, ...]:
    """The stage's times by microbatch, up to the first that exceeds the memory."""
    import torch

    points = []
    for size in sizes:
        try:
            forward, backward = medians(
                _passes(stage, model, size, device), repeats, device
            )
        except torch.OutOfMemoryError:
            print(f"{name}, microbatch {size}: does not fit the memory", flush=True)
            break
        points.append(BlockTime(size, forward, backward))
        there = 1e3 * forward
        back = 1e3 * backward
        times = f"forward {there:.3f} ms, backward {back:.3f} ms"
        print(f"{name}, microbatch {size}: {times} {MEASURED}", flush=True)
    if not points:
        raise UserError(
            f"--microbatches {sizes[0]}: the {name} does not fit the memory"
        )
    return tuple(points)


def _passes(
    stage: Any, model: Model, size: int, device: str
) -> Callable[[Callable[[], None]], None]:
    """A forward and a backward on `size` samples, for `medians`."""
    import torch

    with torch.device(device):
        dtype = stage.config.params_dtype
        entering = torch.randn(model.sequence, size, model.hidden, dtype=dtype)
        gradient = torch.randn_like(entering)
        masked = torch.ones(
            1, 1, model.sequence, model.sequence, dtype=torch.bool
        ).triu(1)
        labels = (
            torch.randint(model.vocab, (size, model.sequence))
            if stage.module.post_process
            else None
        )
    if model.kind == "bert":  # bidirectional
        masked = torch.zeros_like(masked)

    def passes(mark: Callable[[], None]) -> None:
        stage.module.set_input_tensor(entering.detach().requires_grad_())
        mark()
        output = stage(None, None, masked, labels=labels)
        mark()
        if labels is None:
            output.backward(gradient)
        else:
            output.sum().backward()
        mark()

    return passes


def _time_optimizer(
    stage: Any, precision: str, device: str, repeats: int
) -> tuple[float, str]:
    """(seconds a parameter, name) of a step of Megatron's Adam with clipping on the
    stage's parameters."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    floats = dict(
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        params_dtype=stage.config.params_dtype,
    )
    config = OptimizerConfig(optimizer="adam", lr=1e-4, clip_grad=1.0, **floats)
    optimizer = get_megatron_optimizer(config, [stage], use_gloo_process_groups=False)

    def step(mark: Callable[[], None]) -> None:
        for param in stage.parameters():
            param.main_grad.fill_(1e-3)  # finite: fp16 would skip the step otherwise
        mark()
        optimizer.step()
        mark()

    (seconds,) = medians(step, repeats, device)
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = type(parts[0].optimizer)
    name = (
        f"Megatron's {type(parts[0]).__name__} with "
        f"{inner.__module__.split('.')[0]}'s {inner.__name__}"
    )
    seconds /= sum(param.numel() for param in stage.parameters())
    print(
        f"optimizer: {1e9 * seconds:.3f} ns a parameter, {name} {MEASURED}", flush=True
    )
    return seconds, name


def profile_parser(prog: str) -> Parser:
    types = TYPES | {"numbers": numbers}
    parser = parser_of(prog, __file__, types)
    add_model_flags(parser)
    return parser


def measure_blocks(options: argparse.Namespace, model: Model) -> int:
    """Measure and write the profile; the exit status. Of torchrun's ranks only the
    first one measures."""
    if os.environ.get("RANK", "0") != "0":
        return 0
    with file_errors(f"--json {options.json}"):  # known before minutes of measuring
        options.json.parent.mkdir(parents=True, exist_ok=True)
    device, precision = _place(options)
    profile = measure_block(
        model, precision, options.microbatches, device, options.repeats
    )
    with file_errors(f"--json {options.json}"):
        profile.save(options.json)
    print(f"wrote {options.json}", flush=True)
    return 0


def _place(options: argparse.Namespace) -> tuple[str, str]:
    """(device, precision). UserError if no GPU is there."""
    import torch

    from megatron_2bw.mcore import cpu

    if cpu.wanted(options.device):
        return "cpu", options.precision or "fp32"
    if not torch.cuda.is_available():
        raise UserError("--device cuda: no GPU is visible to torch; use --device cpu")
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return "cuda", options.precision or ("bf16" if has_bf16 else "fp16")


def medians(
    work: Callable[[Callable[[], None]], object], rounds: int, device: str
) -> list[float]:
    """Median seconds between the marks of `work`: events on the GPU, otherwise the
    clock."""
    times = []
    for _ in range(WARM_UP[device] + rounds):
        marks = []
        work(partial(_mark, marks, device))
        times.append(_between(marks, device))
    parts = zip(*times[WARM_UP[device] :], strict=True)
    return [statistics.median(part) for part in parts]


def _mark(marks: list[Any], device: str) -> None:
    if device == "cuda":
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append(event)
    else:
        marks.append(time.perf_counter())


def _between(marks: list[Any], device: str) -> list[float]:
    """Seconds between the marks."""
    if device != "cuda":
        return [after - before for before, after in pairwise(marks)]
    import torch

    torch.cuda.synchronize()
    return [1e-3 * before.elapsed_time(after) for before, after in pairwise(marks)]
