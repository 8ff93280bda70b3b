"""Reasons of collectives, in the user's words: the value that moves, its reader, and the plan's lines that cause it.

    mm of model.layers.0.mlp.down_proj, for add; tp: heads, ffn, vocab
    gradient mm of model.layers.0.mlp.down_proj, for the gradient norm; dp: batch
    parameter lm_head.weight, for mm; dp: batch; store params, grads, state
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch.fx import Node

from meshc.ir import op_name, records
from meshc.ir.sharding import Sharding
from meshc.passes.phases.factor_names import FactorNames
from meshc.passes.phases.factors import Instance, Token
from meshc.program.program import Port


def reader_text(node: Node) -> str:
    """Text of an operator that reads a resharded operand."""
    return records(node)[0].reason or _operator_text(node)


def value_text(node: Node, ports: Mapping[Node, Port]) -> str:
    """Text of a value that is moved: its operator and module, or its port."""
    if node in ports:
        return f"{ports[node].kind} {ports[node].name}"
    found = records(node)[0]
    if found.reason:
        return found.reason
    backward = "gradient " if found.phase == "backward" else ""
    return f"{backward}{_operator_text(node)}{f' of {found.source.module}' if found.source.module else ''}"


def summed_factors_text(
    instance: Instance, index: int, chosen: Mapping[Token, Sequence[str]], axes: Iterable[str], names: FactorNames
) -> str:
    """Text of the split factors over which a result is partial along `axes`: `, summed over ffn`; empty if they have no names."""
    over = set(axes)
    tokens = [token for token in instance.sums[index] if over & set(chosen.get(token, ()))]
    factors = dict.fromkeys(names.of[instance.factor[token]] for token in tokens if instance.factor[token] in names.of)
    return f", summed over {' and '.join(factors)}" if factors else ""


def plan_lines(axes: Iterable[str], entries: Mapping[str, str]) -> str:
    """The plan's entries of these axes, each after a semicolon."""
    return "".join(f"; {entries[axis]}" for axis in axes if axis in entries)


def differing_axes(source: Sharding, target: Sharding, order: Sequence[str]) -> list[str]:
    """The axes along which two shardings of one value differ, in the order of the mesh."""

    def places(sharding: Sharding) -> dict[str, object]:
        split = {axis: (dim, position, at) for dim, position, part in sharding.parts() for at, axis in enumerate(part.axes)}
        return {**split, **dict(sharding.partial)}

    mine, theirs = places(source), places(target)
    return [axis for axis in order if mine.get(axis) != theirs.get(axis)]


def _operator_text(node: Node) -> str:
    """`mm` of torch's and meshc's own operators; those of another library with its name."""
    name = op_name(node)
    library, _, rest = name.partition(".")
    return rest.partition(".")[0] if library in ("aten", "meshc") else ".".join(name.split(".")[:2])
