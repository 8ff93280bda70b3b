"""A call that hands a model its cache of keys and values: what the program gets for it, and how its output comes back.

    program(input_ids=[3, 40], cache=DynamicCache())      [4, 64], cache=[], cache_length=None; the cache has buffers of 64, 40 in use
    program(input_ids=[3, 1], cache=cache)                [4, 1], cache=[[k, v], ...], cache_length=40

Rows, tokens and buffers are filled up to sizes of which there are few, so that few programs serve all calls: one for each size of a
prompt, one for each size of the buffers. A token that is filled up stands behind the others, where none of them sees it; what it leaves in
a buffer is written over by the next one. A row that is filled up repeats another. The output is cut to what was asked for, and the cache
in it is the one that came, which has the new buffers (`meshc/runtime/run/cache_layers.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from meshc.api import held_caches
from meshc.api.asked import Asked
from meshc.errors import InputError
from meshc.frontend.padded_sizes import rows_of, tokens_of
from meshc.frontend.stock_caches import LENGTH, NAMES
from meshc.ir import trees
from meshc.runtime.run.session import digest_of

ALONG: Final[Mapping[str, tuple[int, int]]] = {
    "input_ids": (0, 1), "inputs_embeds": (0, 1), "token_type_ids": (0, 1), "mm_token_type_ids": (0, 1), "position_ids": (-2, -1),
}  # fmt: skip
"""Inputs that have a row for each sequence and a place for each new token: these dims."""
MASK: Final = "attention_mask"
KEPT: Final = "logits_to_keep"
TOKENS: Final = ("input_ids", "inputs_embeds")
LEFT: Final[Mapping[str, tuple[int, int, int | None]]] = {
    "logits": (0, 1, None), "hidden_states": (0, 1, None), "attentions": (0, 2, 3),
}  # fmt: skip
"""Outputs, by the first word of their path: their dims of rows, new tokens and keys."""
ADVICE: Final = (
    "\n  why: all ranks work on one sequence, and what a rank has of the cache belongs to the tokens that it was given\n"
    "  what to do: draw the same on every rank, torch.manual_seed(n) before generate; pass the same prompts everywhere"
)


@dataclass(frozen=True)
class CachedCall:
    """
    args, kwargs  what the program gets
    cache, name   the user's cache, and the argument it came as
    rows, tokens  of the user's call, `past` being what the cache held before it
    kept          how many tokens have logits
    """

    args: tuple[object, ...]
    kwargs: dict[str, object]
    cache: Any
    name: str
    rows: int
    tokens: int
    past: int
    kept: int

    def noted(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """What ranks compare of it, by name."""
        plain = [value for key, value in self.kwargs.items() if isinstance(value, Tensor) and key not in (self.name, LENGTH)]
        return ("a digest of what is passed", "the number of tokens before it"), (digest_of(plain), self.past)

    def closed(self, output: Any) -> Any:
        """The output as the model would give it: cut to the call's rows and tokens, with the user's cache. Raises InputError for an
        output that nobody knows how to cut."""
        cache = output[self.name]
        held_caches.put(self.cache, [[layer.keys, layer.values] for layer in cache.layers], self.rows, self.past + self.tokens)
        for name in [name for name in output if name != self.name]:
            output[name] = trees.mapped(self._cut(name), output[name])
        output[self.name] = self.cache
        return output

    def _cut(self, name: str) -> Callable[[object], object]:
        def cut(leaf: object) -> object:
            if not isinstance(leaf, Tensor):
                return leaf
            if name not in LEFT:
                raise InputError(
                    f"the model returns {name} beside its logits, and of a call with a cache meshc knows only {', '.join(LEFT)}\n"
                    f"  what to do: call the model without output of {name}, or without its cache (use_cache=False)"
                )
            rows, tokens, keys = LEFT[name]
            count = self.kept if name == "logits" else self.tokens
            leaf = leaf.narrow(rows, 0, self.rows).narrow(tokens, 0, min(count, leaf.shape[tokens]))
            return leaf if keys is None else leaf.narrow(keys, 0, self.past + self.tokens)

        return cut


def opened(asked: Asked, args: tuple[object, ...], kwargs: Mapping[str, object]) -> CachedCall | None:
    """What a call with a cache becomes; None for one without. Raises InputError for a cache that no program takes."""
    if not any(map(held_caches.is_cache, (*args, *kwargs.values()))):
        return None
    name, cache, args, named = _apart(asked, args, kwargs)
    held_caches.refuse_others(cache)
    _refuse_calls(asked, named)
    first = next((named[key] for key in TOKENS if named.get(key) is not None), None)
    if not isinstance(first, Tensor) or first.dim() < 2:
        raise InputError(f"a call with a cache takes tokens, [rows, tokens]: {' or '.join(TOKENS)}")
    rows, tokens, past = first.shape[0], first.shape[1], held_caches.length_of(cache)
    size = _Size(rows, tokens, past, rows, tokens)
    if not any(isinstance(value, Tensor) and key not in (*ALONG, MASK, KEPT) for key, value in named.items()):  # nobody knows its dims
        size = replace(size, padded_rows=rows_of(rows, asked.data_ranks), padded_tokens=tokens_of(tokens, _positions(asked) - past))
    if past and held_caches.rows_in(cache) != rows:
        raise InputError(f"the cache holds {held_caches.rows_in(cache)} rows, and {rows} were passed")
    kept = named.get(KEPT, 0)
    buffers: list[Any] = []
    width = size.padded_tokens
    if past:
        assert asked.mesh.device_mesh is not None
        buffers = held_caches.buffers_of(cache, asked.mesh.device_mesh, size.padded_rows, past + width)
        width = buffers[0][0].shape[2]
    padded = {key: size.filled(key, value, width) for key, value in named.items()}
    length = torch.tensor(past) if past else None
    call = {**padded, name: buffers, LENGTH: length}
    return CachedCall(args, call, cache, name, rows, tokens, past, _count(kept, tokens))


def _apart(asked: Asked, args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[str, Any, tuple[object, ...], dict[str, object]]:
    """The cache, the argument it is, and the other arguments, by name where the model's forward has names for them."""
    signature = asked.traced.signature
    takes = list(inspect.signature(signature).parameters)
    named = {**dict(zip(takes, args, strict=False)), **kwargs}
    found = [key for key, value in named.items() if held_caches.is_cache(value)]
    name = next((one for one in NAMES if one in takes), NAMES[0])
    if len(found) != 1 or found[0] not in NAMES or asked.step is not None:
        raise InputError(
            f"a program takes one cache, as {name}; this call has one as {', '.join(found)}\n"
            "  what to do: pass what the model's own generate passes"
        )
    cache = named.pop(found[0])
    return name, cache, args[len(takes) :], named


def _refuse_calls(asked: Asked, named: Mapping[str, object]) -> None:
    """Calls that no cache goes with. Raises InputError."""
    gradient = torch.is_grad_enabled() and any(p.requires_grad for p in asked.module.parameters())
    wrong = {
        "it takes gradients, and a cache has none: call it under torch.no_grad(), as generate does": gradient,
        'the program takes parts of a batch: compile it with inputs="global"': asked.inputs != "global",
        'its outputs are left as they lie: compile it with outputs="plain"': asked.outputs != "plain",
        "it has labels, and a loss counts every token: pass the whole sequence, without a cache": named.get("labels") is not None,
        "it says use_cache=False": named.get("use_cache") is False,
        "it says return_dict=False: outputs with a cache have names": named.get("return_dict") is False,
    }
    said = [text for text, is_so in wrong.items() if is_so]
    if said:
        raise InputError("this call has a cache, and cannot: " + "; ".join(said))


def _positions(asked: Asked) -> int:
    """How many positions the model has, as far as its configuration says."""
    config: Any = getattr(asked.module, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    return int(getattr(text, "max_position_embeddings", None) or 1 << 62)


def _count(kept: object, tokens: int) -> int:
    return tokens if kept == 0 else kept if isinstance(kept, int) else tokens


@dataclass(frozen=True)
class _Size:
    """Of a call, and what it is filled up to."""

    rows: int
    tokens: int
    past: int
    padded_rows: int
    padded_tokens: int

    def filled(self, name: str, value: object, width: int) -> object:
        """An input, filled up; `width`: how many keys attention sees."""
        if name == KEPT and isinstance(value, int) and value and self.tokens > 1:
            return torch.arange(max(self.tokens - value, 0), self.tokens)
        if name == MASK:
            return trees.mapped(lambda mask: self._mask(mask, width), value)
        if name not in ALONG or not isinstance(value, Tensor):
            return value
        rows, tokens = ALONG[name]
        value = _repeated(value, tokens, self.padded_tokens) if value.shape[tokens] == self.tokens else value
        return _repeated(value, rows, self.padded_rows) if value.dim() > 1 and value.shape[rows] == self.rows else value

    def _mask(self, mask: object, width: int) -> object:
        """Of tokens, [rows, keys], or of pairs, [rows, 1, tokens, keys]: a key that is filled up is none."""
        if not isinstance(mask, Tensor):
            return mask
        mask = mask[..., : self.past + self.tokens]
        nothing = torch.finfo(mask.dtype).min if mask.dim() == 4 and mask.dtype.is_floating_point else 0
        mask = F.pad(mask, (0, width - mask.shape[-1]), value=nothing)
        mask = _repeated(mask, 2, self.padded_tokens) if mask.dim() == 4 else mask
        return _repeated(mask, 0, self.padded_rows) if mask.shape[0] == self.rows else mask


def _repeated(tensor: Tensor, dim: int, size: int) -> Tensor:
    """The last place of a dim repeated, up to a size."""
    have = tensor.shape[dim]
    if have == size:
        return tensor
    return tensor.index_select(dim % tensor.dim(), torch.arange(size, device=tensor.device).clamp(max=have - 1))
