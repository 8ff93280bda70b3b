"""Length-dependent rotary frequencies of stock models, computed on tensors: `rope_type` "dynamic" and "longrope".

transformers compares the length, a tensor, in Python, and replaces the buffer `inv_freq`; no trace follows that. Here the buffer is
overwritten with the same values:

    n             the largest position of the batch, and 1
    dynamic       n < original length: the original frequencies; else the lesser of those that the buffer holds and those for n
    longrope      n > original length: those of the long factors; else the original ones

Frequencies for a length fall as it grows, so the frequencies of the longest sequence since a short one, which transformers tracks by
numbers in Python, are the least that the buffer has had.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor, nn

from meshc.replacements import replace_in


def follows_length(model: object) -> bool:
    """Whether one more token changes what a model computes for the others, so that its prompts must not be padded."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return any(_kind(module) in KINDS for module in modules)


def traceable_rope(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """A context in which these modules can be traced."""
    owners = {type(module) for module in modules if _kind(module) in KINDS}
    return replace_in("rope", [(owner, "forward", _following(owner.forward)) for owner in owners])


def _following(forward: Any) -> Callable[..., Any]:
    own = inspect.unwrap(forward)  # without the decorator that replaces the buffer

    def follow(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        with torch.no_grad():
            self.inv_freq.copy_(KINDS[self.rope_type](self, position_ids.max() + 1))
            return own(self, x, position_ids)

    return follow


def _kind(module: nn.Module) -> str | None:
    """The kind of a rotary embedding with one buffer of frequencies, by transformers' own formulas; None for any other module."""
    kind, config = vars(module).get("rope_type"), vars(module).get("config")
    given = getattr(config, "rope_parameters", None)
    known = isinstance(kind, str) and isinstance(given, dict) and "alpha" not in given and "original_inv_freq" in module._buffers
    return kind if known else None


def _dynamic(rotary: Any, length: Tensor) -> Tensor:
    config, given = rotary.config, rotary.config.rope_parameters
    most = config.max_position_embeddings
    exponents, dim = _exponents(config)
    stretched = (given["factor"] * length.clamp(min=most) / most) - (given["factor"] - 1)
    longer = 1.0 / ((given["rope_theta"] * stretched ** (dim / (dim - 2))) ** exponents)
    grown = torch.minimum(rotary.inv_freq, torch.where(length > most, longer, rotary.original_inv_freq))
    return torch.where(length < rotary.original_max_seq_len, rotary.original_inv_freq, grown)


def _longrope(rotary: Any, length: Tensor) -> Tensor:
    given = rotary.config.rope_parameters
    exponents, _ = _exponents(rotary.config)
    longer = 1.0 / (torch.tensor(given["long_factor"], dtype=torch.float32) * given["rope_theta"] ** exponents)
    return torch.where(length > given["original_max_position_embeddings"], longer, rotary.original_inv_freq)


def _exponents(config: Any) -> tuple[Tensor, int]:
    """The exponent of each frequency, and the number of a head's dims that are rotated."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dim = int(head * config.rope_parameters.get("partial_rotary_factor", 1.0))
    return torch.arange(0, dim, 2, dtype=torch.int64).float() / dim, dim


KINDS: Final[dict[str, Callable[[Any, Tensor], Tensor]]] = {"dynamic": _dynamic, "longrope": _longrope}
