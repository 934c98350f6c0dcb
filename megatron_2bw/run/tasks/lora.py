"""Low-rank adapters (LoRA, arXiv 2106.09685): two thin matrices beside each linear
layer of a frozen model are trained.

Invariants: an adapter adds alpha / rank * B A x to its layer's output, and B starts at
zero; only adapters have gradients, weight versions and optimizer state; a checkpoint
holds the adapters alone, the model stays in --lora-base.
"""

import argparse
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from megatron.training import get_args, print_rank_0, training
from torch import Tensor
from torch.nn import Parameter

from megatron_2bw.base.errors import UserError
from megatron_2bw.mcore.rebinding import replaced
from megatron_2bw.run.flags.project_flags import ADAPTER


class Adapter(torch.nn.Module):
    """The adapter of one linear layer: A [rank, inputs], B [outputs, rank], split over
    tensor-parallel ranks as the layer is.

    columns  whether the layer's outputs are split, and not its inputs
    name     of the layer in the whole model, from which A is drawn: it depends on no
             parallel size
    """

    def __init__(
        self,
        linear: torch.nn.Module,
        columns: bool,
        name: str,
        config: Any,
        args: argparse.Namespace,
    ):
        super().__init__()
        outputs, inputs = linear.weight.shape
        self.columns = columns
        self.scale = args.lora_alpha / args.lora_rank
        self.config = config
        self.gated = config.gated_linear_unit and name.endswith("linear_fc1")
        new = linear.weight.new_zeros
        self.a = Parameter(new(args.lora_rank, inputs))
        self.b = Parameter(new(outputs, args.lora_rank))
        parts = 1 if columns else parallel_state.get_tensor_model_parallel_world_size()
        rank = 0 if columns else parallel_state.get_tensor_model_parallel_rank()
        generator = torch.Generator()
        generator.manual_seed(zlib.crc32(f"{args.seed} {name}".encode()))
        bound = (inputs * parts) ** -0.5
        matrix = torch.empty(args.lora_rank, inputs * parts)
        matrix.uniform_(-bound, bound, generator=generator)
        self.a.data.copy_(matrix.chunk(parts, dim=1)[rank])
        set_tensor_model_parallel_attributes(self.a, not columns, 1, 1)
        set_tensor_model_parallel_attributes(self.b, columns, 0, 1)
        # Of the whole one each rank sees a part of the sequence; Megatron adds the
        # gradients up.
        (self.a if columns else self.b).sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(x, self.a)
        if self.config.sequence_parallel and self.columns:
            low = mappings.gather_from_sequence_parallel_region(low)
        elif self.config.sequence_parallel:
            low = mappings.reduce_scatter_to_sequence_parallel_region(low)
        elif self.columns:
            low = mappings.copy_to_tensor_model_parallel_region(low)
        else:
            low = mappings.reduce_from_tensor_model_parallel_region(low)
        return F.linear(low, self.b) * self.scale

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The method of this name of Megatron's modules."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        tensor_parallel = parallel_state.get_tensor_model_parallel_group()
        data_parallel = metadata["dp_cp_group"]
        state = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"b": 0} if self.columns else {"a": 1},
            sharded_offsets,
            tp_group=tensor_parallel,
            dp_cp_group=data_parallel,
        )
        if self.gated:  # its rows are those of two matrices
            state[f"{prefix}b"] = apply_swiglu_sharded_factory(
                state[f"{prefix}b"],
                sharded_offsets,
                metadata.get("singleton_local_shards", False),
                tensor_parallel,
                data_parallel,
            )
        return state


def _add(
    adapter: Adapter, linear: torch.nn.Module, inputs: tuple, output: tuple
) -> tuple:
    """A forward hook of the layer; Megatron's layers return the output and the bias."""
    x = inputs[0]
    config = adapter.config
    # Transformer Engine's has the norm in it
    if (weight := getattr(linear, "layer_norm_weight", None)) is not None:
        weight = weight + config.layernorm_zero_centered_gamma
        epsilon = config.layernorm_epsilon
        if config.normalization == "RMSNorm":
            x = F.rms_norm(x, weight.shape, weight, epsilon)
        else:
            x = F.layer_norm(x, weight.shape, weight, linear.layer_norm_bias, epsilon)
    return output[0] + adapter(x), *output[1:]


def adapt(model: torch.nn.Module, args: argparse.Namespace) -> None:
    """Freeze a stage's `model` and put adapters beside the layers of --lora-targets,
    but for those of experts."""
    frozen = sum(param.numel() for param in model.parameters())
    model.requires_grad_(False)
    # adapters are added on the way
    for layer in [*model.modules()]:
        if not isinstance(layer, BaseTransformerLayer):
            continue
        for path, parent in [*layer.named_modules()]:
            if ".experts." not in f".{path}.":
                _adapt(parent, f"{layer.layer_number}.{path}", model.config, args)
    model.config.moe_router_bias_update_rate = 0  # experts' biases are the base's, too
    # a recomputed layer has gradients only if its input asks for one
    if model.pre_process:
        model.embedding.register_forward_hook(_ask_for_gradients)
    load = model.load_state_dict
    model.load_state_dict = lambda state, strict=True: load(state, strict=False)
    for name in ("sharded_state_dict", "state_dict_for_save_checkpoint"):
        setattr(model, name, partial(_adapters_of, getattr(model, name)))
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    needed = args.save and (model.pre_process or args.use_distributed_optimizer)
    if needed and not trained:
        raise UserError(
            "--lora-targets: Megatron cannot save a stage without adapters: add "
            "a target that each stage has"
        )
    print_rank_0(
        f"> --lora-rank {args.lora_rank}: trains {trained:,} parameters beside "
        f"{frozen:,}, on the first rank"
    )


def _adapt(
    parent: torch.nn.Module, name: str, config: Any, args: argparse.Namespace
) -> None:
    """Put adapters beside the linear layers of a module of this name."""
    for target in args.lora_targets:
        linear = getattr(parent, target, None)
        if linear is not None:
            columns = target in ("linear_qkv", "linear_fc1")
            adapter = Adapter(linear, columns, f"{name}.{target}", config, args)
            parent.add_module(target + ADAPTER, adapter)
            linear.register_forward_hook(partial(_add, adapter))


def _ask_for_gradients(module: Any, inputs: tuple, output: Tensor) -> None:
    output.requires_grad_(torch.is_grad_enabled())


def _adapters_of(state_dict: Callable, *args, **kwargs) -> dict[str, Any]:
    """The adapters of a state dict of the model."""
    state = state_dict(*args, **kwargs)
    return {name: value for name, value in state.items() if f"{ADAPTER}." in name}


def adapted(models: list) -> list:
    """A hook of Megatron's before it wraps a stage's models: load the base, and add the
    adapters."""
    args = get_args()
    if args.lora_base is not None:
        # for its weights alone, and it must be there
        with replaced(
            args,
            finetune=True,
            ckpt_step=None,
            pretrained_checkpoint=None,
            exit_on_missing_checkpoint=True,
            ckpt_format="torch_dist",
            use_dist_ckpt=True,
            auto_detect_ckpt_format=True,
        ):
            training.load_checkpoint(models, None, None, load_arg="lora_base")
    for model in models:
        adapt(model, args)
    return models
