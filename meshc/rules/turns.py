"""Lowering of steps along a split sequence to turns of ranks: a call for each turn, the state handed on, and the join of the results.

    rnn(x, ...) on 2 ranks, in 2 parts            turn 0               turn 1               turn 2
                                         rank 0   part 0 from before   part 1 from before
                                         rank 1                        part 0 from rank 0   part 1 from rank 0

    rnn_turn = meshc.rnn_turn("lstm", x, .., None, .., 0, 2, coordinate, 2)       each rank's part at turn 0, if it has one
    halo = halo(state, ["cp"], 0, 2, [2, 1, -1, 1], 0.0)                          its last state goes to the next rank
    rnn_turn_1 = meshc.rnn_turn("lstm", x, .., state_1, .., 1, 2, coordinate, 2)
    ...
    in_turn = meshc.in_turn([out, out_1, out_2], 1, coordinate, 2, False)         this rank's parts of the turns' results

Backward, and recurrences from the last position to the first, run in the other direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import Node

from meshc.ir import records
from meshc.ir.schemas import place_of
from meshc.ops import turns as _operators  # noqa: F401 - registers in_turn
from meshc.rules.operator import Operator, declarations
from meshc.rules.rule import Local, Rule, einsum, shape_of

aten, meshc = torch.ops.aten, torch.ops.meshc

Taken = Callable[[Node | None, Sequence[object]], Node]
"""Emits the call of one turn, from the state of the previous rank, or None, and (slot, parts, place, ranks)."""


def call_in_turns(
    local: Local, axes: Sequence[str], parts: int, back: bool, call: Taken, count: int, alone: bool = False
) -> list[list[Node]]:  # fmt: skip
    """For each of a call's `count` results, its value at each turn. The last is the state that is handed on, with a first dim of size 1.
    `alone`: the state is the call's only result."""
    ranks, place = local.ranks(axes), local.index(axes)
    results: list[list[Node]] = [[] for _ in range(count)]
    handed: Node | None = None
    turns = parts + ranks - 1
    for slot in range(turns):
        made = call(handed, (slot, parts, place, ranks))
        for index in range(count):
            results[index].append(made if alone else local.item(made, index))
        if slot < turns - 1:
            handed = local.hand_on(results[-1][-1], axes, 0, back)
    return results


def join_turns(local: Local, axes: Sequence[str], made: Sequence[Node], dim: int, back: bool) -> Node:
    """This rank's parts among the turns' results, concatenated along `dim`. With rows in one part, the results of the other turns are zeros
    and all are added."""
    ranks = local.ranks(axes)
    if len(made) > ranks:
        return local.emit(meshc.in_turn.default, list(made), dim, local.index(axes), ranks, back)
    found = made[0]
    for other in made[1:]:
        found = local.emit(aten.add.Tensor, found, other)
    return found


def turn_rule(node: Node, tensors: list[Node]) -> Rule:
    """The rule of a turn on a rank's own tile, for a part of the rows, which exists only in lowered code: nothing may be split further."""

    def letters(name: str, shape: Sequence[int]) -> str:
        return " ".join(f"{name}{dim}!" for dim in range(len(shape)))

    operands = ", ".join(letters(f"x{index}d", shape_of(tensor)) for index, tensor in enumerate(tensors))
    results = " | ".join(letters(f"y{index}d", made.shape) for index, made in enumerate(records(node)))
    return einsum(f"{operands} -> {results}", node, tensors)


def _in_turn(node: Node, tensors: list[Node]) -> Rule:
    """The rule of `in_turn`, which exists only in lowered code: nothing may be split further."""
    dims = [f"d{index}!" for index in range(len(tensors[0].meta["meshc"].shape))]
    dim = node.args[1]
    text = " ".join(dims)
    made = " ".join("made!" if index == dim else each for index, each in enumerate(dims))
    return einsum(f"{', '.join([text] * len(tensors))} -> {made}", node, tensors)


def parts_of(node: Node) -> int:
    """Number of parts of the rows of a turn's call, of which it takes one."""
    parts = node.args[place_of(node, "parts")]
    assert isinstance(parts, int)
    return parts


OPERATORS = declarations({
    "meshc.in_turn": Operator(_in_turn),
})
