"""A program for the environment of `make oracles`: megatron-bridge converts the models
of the named folders.

Each folder holds a model of Hugging Face as `hf` and our import of it as `unpadded`.
The program imports nothing of this project, and writes into the folder

- theirs.pt: the parameters of Bridge's import of `hf`, by Megatron's names, and the
  sizes that Bridge gives the model;
- ours.pt: the parameters that Bridge's model reads from `unpadded`;
- back.pt: Bridge's export of those.
"""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection

ABSENT = (
    "apply_rope_fusion bias_activation_fusion bias_dropout_fusion "
    "gradient_accumulation_fusion masked_softmax_fusion "
    "moe_grouped_gemm moe_permute_fusion persist_layer_norm"
).split()  # what a CPU has not
SIZES = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups "
    "kv_channels layernorm_epsilon "
    "normalization rotary_base qk_layernorm add_qkv_bias add_bias_linear "
    "vocab_size moe_router_topk "
    "moe_router_pre_softmax"
).split()


class _Class(type):
    """A class of Transformer Engine, and the classes in it, which Bridge names as bases
    and types at import."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Class(name, (), {})


class _TransformerEngine(ModuleType):
    """A stub. Megatron is imported already, and has seen that there is none."""

    __version__ = "2.9.0"
    __getattr__ = _Class.__getattr__

    @classmethod
    def find_spec(cls, name: str, *_: Any) -> ModuleSpec | None:
        if name.split(".")[0] == "transformer_engine":
            return ModuleSpec(name, cls, is_package=True)
        return None

    @classmethod
    def create_module(cls, spec: ModuleSpec) -> ModuleType:
        return cls(spec.name)

    @classmethod
    def exec_module(cls, module: ModuleType) -> None:
        pass


def model_of(provider: Any) -> GPTModel:
    """Bridge's model, of Megatron's own layers."""
    for name in ABSENT:
        setattr(provider, name, False)
    provider.transformer_layer_spec = get_gpt_layer_local_spec(
        provider.num_moe_experts,
        qk_layernorm=provider.qk_layernorm,
        normalization=provider.normalization,
    )
    provider.use_cpu_initialization = True
    provider.moe_token_dispatcher_type = "allgather"
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    provider.finalize()
    return provider.provide()


def rename_norms(model: GPTModel) -> None:
    """Give the norms the names of Transformer Engine's fused layers. Bridge's tables for
    most families have no others."""
    for layer in model.decoder.layers:
        layer.self_attention.linear_qkv.layer_norm_weight = layer.input_layernorm.weight
        del layer.input_layernorm
        if hasattr(layer.mlp, "linear_fc1"):  # no experts
            layer.mlp.linear_fc1.layer_norm_weight = layer.pre_mlp_layernorm.weight
            del layer.pre_mlp_layernorm


def convert(folder: Path) -> None:
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(str(folder / "hf"))
    provider = bridge.to_megatron_provider(load_weights=False)

    model = model_of(provider)
    weights = dict(model.named_parameters())
    rename_norms(model)
    bridge.load_hf_weights([model])
    sizes = {name: getattr(provider, name) for name in SIZES}
    if provider.rope_scaling:
        sizes["rope_scaling_factor"] = provider.rope_scaling_factor
    torch.save((weights, sizes), folder / "theirs.pt")

    model = model_of(provider)
    state = {"model": model.sharded_state_dict()}
    state = dist_checkpointing.load(state, str(folder / "unpadded" / "release"))
    model.load_state_dict(state["model"])
    torch.save(dict(model.named_parameters()), folder / "ours.pt")
    rename_norms(model)
    back = bridge.export_hf_weights([model], cpu=True, show_progress=False)
    torch.save(dict(back), folder / "back.pt")


if __name__ == "__main__":
    sys.meta_path.insert(0, _TransformerEngine)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    for folder in sys.argv[1:]:
        convert(Path(folder))
