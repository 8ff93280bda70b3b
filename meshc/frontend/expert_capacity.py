"""Capacity of routed experts, from `meshc.Options`, and the treatment of tokens beyond it (dropped, passed through, or an error).

    C = ceil(k T / E x capacity)     T tokens of a group choose k of E experts each; an expert takes C of them

A group is a row of the batch, or `expert_group` tokens, in the order of the batch. So a token that is dropped is dropped on every mesh,
with any number of microbatches, and on one device (`one_device.py`). The formula is that of GShard (Lepikhin et al., arXiv 2006.16668)
and Switch Transformers (Fedus et al., arXiv 2101.03961).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

import torch
from torch import Tensor

from meshc.errors import CaptureError
from meshc.ir import trees
from meshc.ops.capacity import first_choices, heaviest_choices

OVERFLOW: Final = ("drop", "pass", "error")
PRIORITY: Final = ("position", "weight")


@dataclass(frozen=True)
class Capacity:
    """factor    capacity in multiples of an expert's share of the choices if all experts are chosen alike
    overflow  "drop": a choice beyond the capacity counts nothing; "pass": the token itself counts in the place of the expert's output;
              "error": the step raises
    group     tokens of a group; None: those of a row of the batch
    priority  which tokens an expert takes: "position", the first in the group; "weight", those with the highest weights
    """

    factor: float
    overflow: str = "drop"
    group: int | None = None
    priority: str = "position"

    def tokens(self, tokens: int, batch: int) -> int:
        """Tokens of a group, for `tokens` tokens in `batch` rows. Raises CaptureError where the tokens are no multiple of a group."""
        each = self.group or tokens // batch
        if tokens % batch or tokens % each:
            what = f"groups of {each} tokens" if self.group else f"{batch} rows"
            raise CaptureError(
                f"Options(experts=Experts(capacity=)) is of a group of tokens, and the {tokens} tokens of these experts are no number of "
                f"{what}; what to do: Options(experts=Experts(group=)), a number of tokens that divides them"
            )
        return each

    def places(self, tokens: int, chosen: int, experts: int) -> int:
        """The capacity: how many tokens of a group of `tokens` tokens an expert takes. Raises CaptureError for a capacity below 1."""
        evenly = chosen * tokens / experts * self.factor
        if evenly < 1:
            least = experts / (chosen * tokens)
            raise CaptureError(
                f"Options(experts=Experts(capacity={self.factor:g})) lets an expert take {evenly:.3g} tokens of a group: {tokens} tokens "
                f"choose {chosen} of {experts} experts; what to do: a capacity of {least:.3g} or more, or a larger "
                "Options(experts=Experts(group=))"
            )
        return ceil(evenly)

    def limit_choices(self, choice: Tensor, weights: Tensor, batch: int, experts: int) -> Tensor:
        """Choices [t, k] with -1 for those beyond the capacity, given their weights."""
        tokens, chosen = choice.shape
        each = self.tokens(tokens, batch)
        places, strict = self.places(each, chosen, experts), self.overflow == "error"
        rows = choice.reshape(tokens // each, each, chosen)
        if self.priority == "weight":
            made = heaviest_choices(rows, weights.detach().reshape(rows.shape), experts, places, strict, "")
        else:
            before = torch.zeros(tokens // each, experts, dtype=torch.int64, device=choice.device)
            made = first_choices(rows, before, places, strict, "")
        return made.reshape(tokens, chosen)


def rows_of(inputs: object) -> int:
    """Rows of the batch: those of the first input."""
    leaves: Sequence[Tensor] = [leaf for leaf in trees.leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()]
    return leaves[0].shape[0] if leaves else 1
