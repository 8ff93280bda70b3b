"""What outputs of stock models call their cache: `cache` as of transformers 5.24, `past_key_values` before."""

from typing import Final

from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE: Final = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
