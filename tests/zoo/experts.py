"""Stock `transformers` families whose layers have routed experts: small, of every form in which that library writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from tests.models import Case
from tests.zoo.families import BART_LIKE, EXPERTS, LLAMA_LIKE, ROTARY, T5_LIKE, Stock, causal, translated


@dataclass(frozen=True)
class Wide(Stock):
    """In float64, routers too, which cast to a dtype of their own that their configuration does not let be float64."""

    def case(self, name: str, **sizes: Any) -> Case:
        found = super().case(name, **sizes)
        found.model.double()
        for each in found.model.modules():
            if type(each).__name__.endswith("Router") and hasattr(each, "dtype"):
                each.dtype = torch.float64
        return found


def shallow(family: str) -> Case:
    """With one layer, of a family whose first layer has experts."""
    return FAMILIES[family].case(family, num_hidden_layers=1)


MOE: Final = {**LLAMA_LIKE, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT: Final = {
    **LLAMA_LIKE, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 24,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
}  # fmt: skip

FAMILIES: Final[dict[str, Stock]] = {
    "mixtral": Stock("MixtralConfig", "MixtralForCausalLM", {**LLAMA_LIKE, **EXPERTS, "output_router_logits": True}, causal),
    "olmoe": Stock("OlmoeConfig", "OlmoeForCausalLM", {**LLAMA_LIKE, "num_experts": 8, "num_experts_per_tok": 3}, causal),
    "qwen2_moe": Stock("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**MOE, "shared_expert_intermediate_size": 40}, causal),
    "qwen3_moe": Stock("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**MOE, "decoder_sparse_step": 2}, causal),
    "deepseek_v2": Stock("DeepseekV2Config", "DeepseekV2ForCausalLM", {**LATENT, "topk_method": "group_limited_greedy"}, causal),
    "deepseek_v3": Stock("DeepseekV3Config", "DeepseekV3ForCausalLM", LATENT, causal),
    "gpt_oss": Stock(
        "GptOssConfig", "GptOssForCausalLM",
        {**LLAMA_LIKE, **EXPERTS, "head_dim": 8, "sliding_window": 4, "rope_parameters": ROTARY}, causal,
    ),
    "granitemoe": Stock("GraniteMoeConfig", "GraniteMoeForCausalLM", {**LLAMA_LIKE, **EXPERTS}, causal),
    "jamba": Stock(
        "JambaConfig", "JambaForCausalLM",
        {**LLAMA_LIKE, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False,
         "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}, causal,
    ),
    "phimoe": Stock("PhimoeConfig", "PhimoeForCausalLM", {**LLAMA_LIKE, **EXPERTS}, causal),
    "glm4_moe": Stock(
        "Glm4MoeConfig", "Glm4MoeForCausalLM",
        {**MOE, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}, causal,
    ),
    "ernie4_5_moe": Stock(
        "Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM",
        {**LLAMA_LIKE, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1,
         "moe_layer_start_index": 1}, causal,
    ),
    "switch_transformers": Wide(
        "SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration",
        {**T5_LIKE, "num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4,
         "expert_capacity": 4, "dropout_rate": 0.0}, translated,
    ),
    "nllb_moe": Wide(
        "NllbMoeConfig", "NllbMoeForConditionalGeneration",
        {**BART_LIKE, "num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2, "moe_token_dropout": 0.0, "dropout": 0.0,
         "attention_dropout": 0.0, "activation_dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}, translated,
    ),
    "dbrx": Stock(
        "DbrxConfig", "DbrxForCausalLM",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 65,
         "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
         "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}}, causal,
    ),
}  # fmt: skip
