"""Stock `transformers` families with a recurrence along the sequence, small: layers of scans, or of these and of attention in turn."""

from __future__ import annotations

from typing import Final

from tests.zoo.experts import MOE
from tests.zoo.families import LLAMA_LIKE, Stock, causal

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
    "olmo_hybrid": Stock("OlmoHybridConfig", "OlmoHybridForCausalLM", {**LLAMA_LIKE, **DELTA}, causal),
}  # fmt: skip
