"""Values of experts that have rows for used places alone, in a proof, and who may read them: by row, or by the same choices."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.fx import Node

from meshc.ir import is_getitem, operands, records
from meshc.ir.schemas import RESHAPES
from meshc.ir.used_rows_dims import fault
from meshc.ops import bounded_groups as _bounded  # noqa: F401 - registers its operators
from meshc.ops import expert_groups as _groups  # noqa: F401 - registers its operators
from meshc.ops import used_rows as _used_rows  # noqa: F401 - likewise
from meshc.proof.held import Held
from meshc.proof.tile_moves import reshape_dims
from meshc.proof.tiles import Tiles

if TYPE_CHECKING:
    pass

Of: TypeAlias = Callable[[Node], Held]
meshc = torch.ops.meshc
USED, PLACED, WEIGHTS = meshc.used_rows.default, meshc.places_of_rows.default, meshc.weights_to_tokens.default


class UsedRows:
    """By which choices the rows of a value are used; of values without an entry all rows are there."""

    def __init__(self) -> None:
        self._choices: dict[Node, Tiles] = {}

    def choices(self, node: Node) -> Tiles | None:
        """By which choices a value's rows are used; None where all rows are there."""
        return self._choices.get(node)

    def fault(self, node: Node, held: Of) -> str:
        """What is wrong with a call that reads used rows; "" if nothing is. Notes by which choices its own rows are used."""
        if is_getitem(node) and node.args[0].target is USED:  # type: ignore[union-attr]
            own = held(node.args[0].args[0])  # type: ignore[union-attr, arg-type]
            if isinstance(own, Tiles):
                self._choices[node] = flat_choices(own)
            return fault(node)
        choices = {self._choices[one] for one in node.all_input_nodes if one in self._choices}
        if len(choices) > 1:
            return "it takes rows together that are used by different choices"
        if choices:
            (by,) = choices
            placed = all(records(one)[0].used is None for one in operands(node))
            if records(node)[0].used is not None or node.target is PLACED or placed and node.target in RESHAPES:
                self._choices[node] = by
            elif placed and not (node.target is WEIGHTS and isinstance(own := held(node.args[1]), Tiles) and flat_choices(own) == by):  # type: ignore[arg-type]
                return "it reads places without a row, which hold nothing"
        return fault(node)


def flat_choices(own: Tiles) -> Tiles:
    return reshape_dims(own, (1, prod(own.shape)))
