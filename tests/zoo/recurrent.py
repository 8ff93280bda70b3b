"""Stock `transformers` families with a recurrence along the sequence, small: layers of scans, or of these and of attention in turn."""

from __future__ import annotations

from typing import Final

from tests.zoo.experts import MOE
from tests.zoo.families import LLAMA_LIKE, VOCAB, Stock, causal

LAYERS: Final = ["linear_attention", "full_attention"]
DELTA: Final = {
    "layer_types": LAYERS, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip

FAMILIES: Final[dict[str, Stock]] = {
    "qwen3_next": Stock(
        "Qwen3NextConfig", "Qwen3NextForCausalLM", {**MOE, **DELTA, "shared_expert_intermediate_size": 24}, causal,
    ),
    "qwen3_5": Stock("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**LLAMA_LIKE, **DELTA, "head_dim": 8}, causal),
    "rwkv": Stock(
        "RwkvConfig", "RwkvForCausalLM",
        {"vocab_size": VOCAB, "context_length": 64, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2},
        causal,
    ),
    "falcon_mamba": Stock(
        "FalconMambaConfig", "FalconMambaForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4, "pad_token_id": 0}, causal,
    ),
    "zamba": Stock(
        "ZambaConfig", "ZambaForCausalLM",
        {**LLAMA_LIKE, "num_key_value_heads": 4, "attention_hidden_size": 64, "num_hidden_layers": 4, "mamba_d_state": 8,
         "mamba_dt_rank": 4, "n_mamba_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 0}, causal,
    ),
    "olmo_hybrid": Stock("OlmoHybridConfig", "OlmoHybridForCausalLM", {**LLAMA_LIKE, **DELTA}, causal),
}  # fmt: skip
