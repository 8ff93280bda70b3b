"""Owners of the tiles in ring attention: the rank that each shifted value comes from, against the attention's arguments.

    k_1: "f32[..]" = ring_shift(k, ["cp"], 1)              the tile of the rank 1 place before this one along cp
    c_1: "int" = ring_place(coordinate, 1, 3)              that rank's coordinate
    n_1: "int" = tile_start(12, [3], [c_1])                the start of that rank's tile
    attention(q, k_1, v_1, ..., n_1, ...)            accepted: all of one rank
    add(g_1, g_2)                                          refused if g_1 is of the rank 1 place before and g_2 of the rank 2 before

Gradients of a block's keys and values belong to the owner of the block; as many shifts as the ring has ranks return them. That an
attention reads each block once is not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final

import torch
from torch.fx import Node

from meshc import ir
from meshc.check.inferred_sharding import InferredSharding, dim_text
from meshc.check.spmd_shardings import Place, Places
from meshc.check.types import Wrong
from meshc.ir.schemas import named_arguments
from meshc.ir.window import tile_length
from meshc.ops import attention as _attention  # noqa: F401 - registers them
from meshc.ops import attention_zigzag as _zigzag  # noqa: F401

meshc = torch.ops.meshc
FORWARD: Final = (meshc.attention.default, meshc.attention_zigzag.default)
BACKWARD: Final = (
    meshc.attention_backward.default, meshc.attention_zigzag_backward.default, meshc.attention_bias_backward.default,
)  # fmt: skip
OF_QUERIES: Final = ("start", "queries_of")
OF_KEYS: Final = ("first", "real", "keys_of")
"""Arguments with positions of queries, or of a block of keys."""
OF_BIAS: Final = 3
"""Index of the bias's gradient among the results of a backward; its columns are the block's keys."""

Back = Mapping[tuple[str, ...], int]


def ring_offsets(
    node: Node, given: Mapping[Node, InferredSharding], places: Places, sizes: Mapping[str, int], count: int
) -> list[Back]:
    """For each of `count` results, axes of a ring -> places before this rank of its owner. Raises Wrong for operands of several ranks."""
    if node.target is torch.ops.aten.cat.default:
        return [common_offsets([*given.values()])]
    named = named_arguments(node) if node.target in (*FORWARD, *BACKWARD) else {}
    if "start" in named:
        _check_start(named, given, places)
    if named.get("real") is None and "keys_of" not in named:
        return [_shared_offsets(given)] * count
    keys = _block_offsets(node, given, places, sizes)
    columns = [place for place in range(1, count) if node.target in BACKWARD and not (place == OF_BIAS and _is_same_for_keys(node))]
    return [keys if place in columns else {} for place in range(count)]


def common_offsets(given: Sequence[InferredSharding]) -> Back:
    """The offsets that all operands of a concatenation share: tiles of several ranks may be concatenated."""
    return {axes: back for axes, back in given[0].back.items() if all(one.back.get(axes) == back for one in given)}


def _is_same_for_keys(node: Node) -> bool:
    bias = named_arguments(node).get("bias")
    return isinstance(bias, Node) and ir.record(bias).shape[3] == 1


def _check_start(named: Mapping[str, Any], given: Mapping[Node, InferredSharding], places: Places) -> None:
    """Raises Wrong if queries are split and a causal mask does not start at the start of their tile."""
    q = named["q"]
    parts, start = given[q].dims[2], places.get(named.get("start"))
    _check_number("start", start, 0, q, given)
    if named["causal"] and parts and parts[0].axes and start is None:
        raise Wrong(f"{q} is [{dim_text(parts)}] along dim 2, and its causal mask starts at {named['start']} on all ranks")


def _shared_offsets(given: Mapping[Node, InferredSharding]) -> Back:
    if len(given) == 1:  # the owner of a single operand is known even if its dims are not
        (spread,) = given.values()
        return {**{(axis,): 0 for axis in spread.split_axes() or ()}, **spread.back}
    found: dict[tuple[str, ...], tuple[int, Node]] = {}
    for axes in {axes for spread in given.values() for axes in spread.back}:
        for one, spread in given.items():
            back = _known_offset(spread, axes)
            known, who = found.setdefault(axes, (back, one)) if back is not None else (None, one)
            if known != back:
                raise Wrong(f"{who} is {whose(known or 0, axes)}, {one} {whose(back or 0, axes)}: it takes those of one rank")
    return {axes: back for axes, (back, _) in found.items()}


def whose(back: int, axes: Sequence[str]) -> str:
    return f"of the rank {back} before this one along {'/'.join(axes)}" if back else "of this rank"


def _known_offset(spread: InferredSharding, axes: tuple[str, ...]) -> int | None:
    """How many places before this rank the owner is; None if unknown, as for a value that `axes` do not split."""
    if axes in spread.back:
        return spread.back[axes]
    return 0 if spread.split_axes() is not None and set(axes) & (spread.split_axes() or frozenset()) else None


def _block_offsets(
    node: Node, given: Mapping[Node, InferredSharding], places: Places, sizes: Mapping[str, int]
) -> Back:
    """The offset of the owner of the block of keys. Raises Wrong for operands or positions of another rank."""
    named = named_arguments(node)
    for name in OF_QUERIES:
        _check_number(name, places.get(named.get(name)), 0, named["q"], given)
    told = [(name, place) for name in OF_KEYS if (place := places.get(named.get(name))) is not None]
    if not told:
        return {}
    axes, back = told[0][1].axes, told[0][1].back
    for name, place in (*told, *_last_offset(named, places, axes)):
        _check_number(name, place, back, named["k"], given)
    if len({(place.size, place.counts, place.unit) for _, place in told}) > 1:
        raise Wrong(f"its {' and '.join(name for name, _ in told)} are numbers of tiles of different sizes")
    for name in ("k", "v", "bias"):
        if isinstance(one := named.get(name), Node):
            found = given[one].back.get(axes) if name == "bias" else _known_offset(given[one], axes)
            if found not in (None, back):
                raise Wrong(f"{one} is {whose(found or 0, axes)}, and {told[0][0]} is {whose(back, axes)}: it takes those of one rank")
    ranks = prod(sizes[axis] for axis in axes)
    if named.get("ranks", ranks) != ranks:
        raise Wrong(f"{'/'.join(axes)} has {ranks} ranks, not {named['ranks']}")
    return {axes: back}


def _last_offset(named: Mapping[str, Any], places: Places, axes: Sequence[str]) -> Iterator[tuple[str, Place]]:
    """For an attention that draws random numbers: the last of the draw's offsets that depend on `axes`, which is the offset of the keys."""
    found = [places.get(one) for one in named.get("offsets") or ()]
    own = [place for place in found if place is not None and place.axes == axes]
    if any(place.back for place in own[:-1]):
        raise Wrong("its offsets are of another rank's tile, but for the keys'")
    yield from (("offsets", place) for place in own[-1:])


def _check_number(name: str, place: Place | None, back: int, x: Node, given: Mapping[Node, InferredSharding]) -> None:
    """Raises Wrong for a position `name` of another rank's tile, or of another tile than dim 2 of `x` (q or k) has."""
    if place is None:
        return
    if place.back != back:
        raise Wrong(f"its {name} is {whose(place.back, place.axes)}, and not {whose(back, place.axes)}")
    if place.size is None or name == "offsets":
        return
    parts, extent = given[x].dims[2], ir.record(x).shape[2]
    if tile_length(place.size, place.counts) * place.unit != extent:
        raise Wrong(f"its {name} is a number of tiles of {place.size} positions of {place.unit}, and {x} has {extent} on a rank")
    if not parts or parts[0].axes != place.axes:
        return
    unit = prod(part.size for part in parts[1:])
    if (place.size, place.unit, place.starts) != (parts[0].size, unit, name != "real"):
        raise Wrong(f"its {name} is a number of tiles of {place.size} positions of {place.unit}, and along dim 2 lies [{dim_text(parts)}]")
