"""Calls padded to a small set of sizes, and outputs cut back to the sizes of the call, by letters of their dims.

    input_ids  "rt"        [3, 11] -> [4, 16]       rows, and the tokens of this call
    attention_mask  "rk"   [3, 11] -> [4, 16]       rows, and the keys that attention sees
    logits  "rt"           [4, 16, vocab] -> [3, 11, vocab]

A padded row or token repeats the last one; a padded key or source token is masked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from meshc.errors import InputError
from meshc.ir import trees

Letters = Mapping[str, str]
"""Name of an input or output -> letters of its dims: `r` rows, `t` tokens of this call, `k` keys, `s` tokens of the encoder."""


@dataclass(frozen=True)
class Table:
    """Letters of the inputs and outputs of a kind of model. masks: inputs that mark valid keys, or source tokens."""

    inputs: Letters
    masks: Letters
    outputs: Letters


ALONE: Final = Table(
    {"input_ids": "rt", "inputs_embeds": "rt", "token_type_ids": "rt", "mm_token_type_ids": "rt", "position_ids": "rt"},
    {"attention_mask": "rk"},
    {"logits": "rt", "last_hidden_state": "rt", "hidden_states": "rt", "attentions": "r.tk"},
)
"""A causal model, or its decoder without a head."""
ENCODER: Final = Table(
    {"input_ids": "rs", "inputs_embeds": "rs"},
    {"attention_mask": "rs"},
    {"last_hidden_state": "rs", "hidden_states": "rs", "attentions": "r.ss"},
)
BOTH: Final = Table(
    {
        "decoder_input_ids": "rt", "decoder_inputs_embeds": "rt", "decoder_position_ids": "rt", "encoder_outputs": "rs",
        "input_ids": "rs", "inputs_embeds": "rs",
    },
    {"attention_mask": "rs", "decoder_attention_mask": "rk"},
    {
        "logits": "rt", "last_hidden_state": "rt", "decoder_hidden_states": "rt", "decoder_attentions": "r.tk", "cross_attentions": "r.ts",
        "encoder_last_hidden_state": "rs", "encoder_hidden_states": "rs", "encoder_attentions": "r.ss",
    },
)  # fmt: skip
"""A decoder with its encoder."""
SEEN: Final = Table(
    {name: letters for name, letters in BOTH.inputs.items() if name.startswith(("decoder", "encoder"))} | {"attention_mask": "r."},
    {"decoder_attention_mask": "rk"},
    BOTH.outputs,
)
"""A decoder with an encoder of sound or images, of which rows alone are padded: attention to the encoder may have no mask, and a mask that
is passed is that of the encoder's input."""
PAIRS: Final = "r.tk"
"""A mask of pairs, [rows, heads or 1, tokens, keys]."""


@dataclass(frozen=True)
class CallSizes:
    """have: the size of each letter in a call; filled: its padded size."""

    have: Mapping[str, int]
    filled: Mapping[str, int]

    def pad_input(self, table: Table, name: str, value: object) -> object:
        """An input, padded; a leaf that is no tensor of rows is returned as it is."""
        if name in table.masks:
            if isinstance(value, dict):  # by kind of layer, from a set of transformers': its order differs between processes
                value = dict(sorted(value.items()))
            return trees.map_leaves(lambda mask: self._pad_mask(table.masks[name], mask), value)
        letters = table.inputs.get(name)
        return value if letters is None else trees.map_leaves(lambda leaf: self._pad_leaf(letters, leaf), value)

    def _pad_leaf(self, letters: str, leaf: object) -> object:
        if not isinstance(leaf, Tensor) or leaf.dim() > 3:
            return leaf
        begin = max(leaf.dim() - len(letters), 0) if not leaf.dtype.is_floating_point else 0  # a dim of kinds of positions comes first
        return self._repeat_last(leaf, letters, begin)

    def _repeat_last(self, tensor: Tensor, letters: str, begin: int = 0) -> Tensor:
        """A tensor with its last rows and tokens repeated, in the dims of `letters` from `begin` on that have the call's sizes."""
        for dim, letter in enumerate(letters, begin):
            if letter != "." and tensor.shape[dim] == self.have[letter]:
                tensor = repeat_last(tensor, dim, self.filled[letter])
        return tensor

    def _pad_mask(self, letters: str, mask: object) -> object:
        if not isinstance(mask, Tensor):
            return mask
        letters = PAIRS[:-1] + letters[-1] if mask.dim() == 4 else letters
        rest, last = letters[:-1], letters[-1]
        nothing = torch.finfo(mask.dtype).min if mask.dim() == 4 and mask.dtype.is_floating_point else 0
        mask = mask[..., : self.have[last]]
        mask = F.pad(mask, (0, self.filled[last] - mask.shape[-1]), value=nothing)
        return self._repeat_last(mask, rest)

    def output_cutter(self, table: Table, name: str, kept: int) -> Callable[[object], object]:
        """A function that cuts leaves of the output `name` to the call's sizes. `kept`: how many tokens have logits. It raises InputError
        for an output without letters, unless nothing was padded (a call with images)."""
        as_passed = all(self.filled[letter] == size for letter, size in self.have.items())

        def cut_leaf(leaf: object) -> object:
            if not isinstance(leaf, Tensor):
                return leaf
            if name not in table.outputs:
                if as_passed:
                    return leaf
                raise InputError(
                    f"the model returns {name} beside its logits, and of a call with a cache meshc knows only {', '.join(table.outputs)}\n"
                    f"  what to do: call the model without output of {name}, or without its cache (use_cache=False)"
                )
            for dim, letter in enumerate(table.outputs[name]):
                if letter != ".":
                    leaf = leaf.narrow(dim, 0, min(kept if (name, letter) == ("logits", "t") else self.have[letter], leaf.shape[dim]))
            return leaf

        return cut_leaf


def repeat_last(tensor: Tensor, dim: int, size: int) -> Tensor:
    """The last index of `dim` repeated, up to `size`."""
    have = tensor.shape[dim]
    return tensor if have == size else tensor.index_select(dim, torch.arange(size, device=tensor.device).clamp(max=have - 1))
