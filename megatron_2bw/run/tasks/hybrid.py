"""The layers of --hybrid-layer-pattern without Transformer Engine: attention (*), MLPs
(-) and experts (E).

Invariant: they are the halves of a GPT's local layers, so a pattern such as *-*- is a
GPT.
"""

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)


class LocalStack(HybridStack):
    """Megatron's, whose norm behind the last layer is Transformer Engine's."""

    def __init__(self, config: Any, submodules: HybridStackSubmodules, **others: Any):
        super().__init__(config, submodules, post_layer_norm=False, **others)
        self.post_layer_norm = True
        if self.post_process:
            norm = _halves(config).input_layernorm
            self.final_norm = norm(
                config=config,
                hidden_size=config.hidden_size,
                eps=config.layernorm_epsilon,
            )


def _halves(config: Any, experts: int | None = None) -> TransformerLayerSubmodules:
    return get_gpt_layer_local_submodules(
        num_experts=experts, normalization=config.normalization
    )


def local_stack(config: Any) -> ModuleSpec:
    """The specification of the layers, for Megatron's configuration of a
    transformer."""
    dense = _halves(config)
    routed = _halves(config, config.num_moe_experts)

    def mlp_layer(module: type, mlp: Any) -> ModuleSpec:
        parts = TransformerLayerSubmodules(
            pre_mlp_layernorm=dense.pre_mlp_layernorm,
            mlp=mlp,
            mlp_bda=dense.mlp_bda,
            sharded_state_dict_keys_map=dense.sharded_state_dict_keys_map,
        )
        return ModuleSpec(module=module, submodules=parts)

    attention = TransformerLayerSubmodules(
        input_layernorm=dense.input_layernorm,
        self_attention=dense.self_attention,
        self_attn_bda=dense.self_attn_bda,
        sharded_state_dict_keys_map=dense.sharded_state_dict_keys_map,
    )
    layers = HybridStackSubmodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=mlp_layer(MLPLayer, dense.mlp),
        moe_layer=mlp_layer(MoETransformerLayer, routed.mlp),
    )
    return ModuleSpec(module=LocalStack, submodules=layers)
