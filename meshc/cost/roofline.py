"""Predicted seconds of one operator of a per-rank program: a roofline over its local shapes.

    seconds = max(flops / rate of its dtype + product_moves * moving, moving) + launch
    moving  = bytes read and written / memory bandwidth

Operands and results are each read or written once: what a composite operator (attention, an optimizer's update of all parameters) makes
inside is not memory traffic of its own. Views and integers take nothing. In a compiled region, lines whose values are made for one another
are one kernel (`fused_values.py`): what is between them is not moved, and only the last is launched. Williams, Waterman, Patterson:
Roofline (CACM 52(4), 2009). On a CPU a product does not multiply while it brings its operands into the order in which it does (Goto, van
de Geijn: Anatomy of High-Performance Matrix Multiplication, ACM TOMS 34(3), 2008): thin ones, which multiply little by what they move, are
slower by that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isqrt
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import torch
from torch.fx import Node

from meshc import ir
from meshc.cost import scaled_products
from meshc.cost.devices import Device
from meshc.cost.flops import flops, is_attention, is_product
from meshc.cost.fused_values import is_fused
from meshc.ir import spmd
from meshc.ir.schemas import named_arguments, place_of, written_operands
from meshc.ir.trail import compute_tracked, largest, smallest
from meshc.lazy_module import LazyModule
from meshc.ops import turns
from meshc.ops.attention import rows_that_see
from meshc.ops.attention_spans import spans
from meshc.private import OpOverload
from meshc.program import packing

if TYPE_CHECKING:
    from meshc.ops import delta_rule_chunks
    from meshc.rules import families
else:
    delta_rule_chunks = LazyModule("meshc.ops.delta_rule_chunks")
    families = LazyModule("meshc.rules.families")


@dataclass(frozen=True, slots=True)
class Price:
    """What an operator takes, and would take if those of its values that grow had `times` their size.

    work_s   of its multiplications and additions; they grow if any of its values does
    fixed_s  of moving the values that do not grow;  grown_s  of those that do
    apart    how often they are moved while nothing is multiplied
    """

    work_s: float = 0.0
    fixed_s: float = 0.0
    grown_s: float = 0.0
    launch_s: float = 0.0
    grows: bool = False
    apart: float = 0.0

    def seconds(self, times: float = 1.0) -> float:
        moving_s = self.fixed_s + self.grown_s * times
        return largest(self.work_s * (times if self.grows else 1.0) + self.apart * moving_s, moving_s) + self.launch_s


FREE: Final = Price()

Grows: TypeAlias = Callable[[Node, int], bool]
"""Whether a result of a node grows."""


def grows_never(node: Node, index: int) -> bool:
    """What grows, where nothing does."""
    return False


def seconds(node: Node, device: Device) -> float:
    """Predicted seconds of one node of a per-rank graph on a rank; 0 for what runs nothing, for collectives and copies (`cost.links`)."""
    return price(node, device).seconds()


def start_seconds(nodes: Iterable[Node], device: Device) -> dict[Node, float]:
    """Start of each node in seconds, if the device runs nodes one after another and never waits."""
    nodes = list(nodes)
    return dict(zip(nodes, accumulate((seconds(node, device) for node in nodes), initial=0.0), strict=False))


def price(node: Node, device: Device, grows: Grows = grows_never) -> Price:
    """The same, by what of it grows."""
    if node.op != "call_function" or ir.is_getitem(node) or not _runs(node):
        return FREE
    if spmd.is_collective(node.target) or spmd.is_host_copy(node.target):
        return FREE
    if device.host is not None and ir.runs_on_host(node):
        device = device.there
    rate = device.rate(_dtype(node), attention=is_attention(node))
    fixed, grown = _traffic_bytes(node, grows)
    launch_s = 0.0 if is_fused(node) else device.launch_s * kernels(node, device.host is None)
    work_s, bytes_per_s = _work(node, device) / rate, device.bytes_per_s
    grown_any = grows is not grows_never and any(grows(*value) for value in _values(node))
    return Price(work_s, fixed / bytes_per_s, grown / bytes_per_s, launch_s, grown_any, product_moves(node, device))


def _values(node: Node) -> Iterator[tuple[Node, int]]:
    """What an operator reads, and makes."""
    yield from map(ir.value_of, ir.operands(node))
    yield from ((node, index) for index in range(len(ir.records(node))))


def product_moves(node: Node, device: Device) -> float:
    """How often a product moves its operands and results while it does not multiply; 0 for other operators."""
    return device.product_moves if is_product(node) and not is_attention(node) else 0.0


def moved_bytes(node: Node) -> float:
    """Bytes that one node's operator reads and writes in memory."""
    return sum(_traffic_bytes(node, grows_never))


def _traffic_bytes(node: Node, grows: Grows) -> tuple[float, float]:
    """Bytes that are read and written: of values that do not grow, and of those that do."""
    written = _overwritten(node)
    operator = families.operator_of(node.target)
    made = [] if written or operator.uninitialised else list(map(ir.local_bytes, ir.records(node)))
    moved = {False: 0.0, True: 0.0}
    for index, size in enumerate([] if is_fused(node) else made):
        moved[grows(node, index)] += size
    parts = operand_shares(node)
    picked = ir.operands(node)[0] if operator.gathers else None
    for operand in dict.fromkeys(ir.operands(node)):
        if operand is picked:  # as many rows as are made
            moved[grows(node, 0)] += smallest(sum(made), _read_bytes(operand))
        else:
            moved[grows(*ir.value_of(operand))] += _read_bytes(operand) * parts.get(operand, 1.0)
    for operand in written:
        moved[grows(*ir.value_of(operand))] += _bytes(operand)
    return moved[False], moved[True]


def _runs(node: Node) -> bool:
    """Whether a node makes a rank do anything beyond arithmetic with integers and looking at memory in another way."""
    if _overwritten(node):
        return True
    return not (packing.is_view(node) or all(one.dtype is None for one in ir.records(node)))


def _overwritten(node: Node) -> list[Node]:
    """The operands that an operator writes into."""
    return written_operands(node.target, node.args, {}) if isinstance(node.target, OpOverload) else []


def _bytes(value: Node) -> int:
    producer, index = ir.value_of(value)
    return ir.local_bytes(ir.records(producer)[index]) if ir.has_record(producer) else 0


def _read_bytes(value: Node) -> int:
    """Bytes behind an operand: of an expanded view no more than what it looks at, of what is never in memory none."""
    size = _bytes(value)
    while packing.is_view(value) and not ir.is_getitem(value):
        value = value.all_input_nodes[0]
        size = smallest(size, _bytes(value))
    return 0 if is_fused(value) else size


def _dtype(node: Node) -> torch.dtype:
    """In which an operator computes: its first operand's, or else its result's."""
    if node.target in scaled_products.SCALED and scaled_products.why_emulated(node):
        return torch.float32
    for value in (*ir.operands(node), node):
        producer, index = ir.value_of(value)
        found = ir.records(producer)[index].dtype if ir.has_record(producer) else None
        if found is not None and found.is_floating_point:
            return found
    return torch.float32


def _work(node: Node, device: Device) -> float:
    count = flops(node)
    return count * _visible_share(node, device.attention_keys) if count and is_attention(node) else count


def _visible_share(attention: Node, block: int) -> float:
    """The part of the scores that attention's kernels compute, which go through `block` keys at once; what a mask that is given as a tensor
    leaves out is not known before it is there.

    Where the tile of the queries begins differs by rank: the last one sees most, and the others wait for it.
    """
    given = named_arguments(attention)
    queries, keys = ir.record(given["q"]).shape[2], ir.record(given["k"]).shape[2]
    if "keys_of" in given:
        return 0.5  # on every rank two pairs of halves of four
    if not given["causal"] or not queries * keys:
        return 1.0
    if given.get("first") is not None and given["real"] is not None:
        return compute_tracked(
            _share_of_block_scores, given["window"], queries, keys, block, *(number for at in _places(given) for number in at)
        )
    start = largest(0, keys - queries - given["offset"]) if isinstance(given["start"], Node) else given["start"]
    return compute_tracked(_share_of_scores, queries, keys, given["window"], given["offset"] + start, block)


def _share_of_scores(queries: int, keys: int, window: int, offset: int, block: int) -> float:
    return scores_computed(queries, keys, window, offset, block) / (queries * keys)


def scores_computed(queries: int, keys: int, window: int, offset: int, block: int) -> float:
    """How many scores kernels compute that go through `block` keys at once."""
    seen = 0.0
    for rows, parts in spans(queries, keys, window, offset):
        for part in parts:
            wide = part.keys.stop - part.keys.start
            seen += (rows.stop - rows.start) * (min(wide, (wide + block) / 2) if part.how == "causal" else wide)
    return seen


def _share_of_block_scores(window: int, queries: int, keys: int, block: int, *places: int) -> float:
    """Of a block of a ring, as queries see it that stand at its key `at`, if `real` of its positions are keys. `places`: the pairs (at,
    real) of all ranks."""
    most = 0.0
    for at, real in zip(places[::2], places[1::2], strict=True):
        rows = rows_that_see(queries, real, window, at)
        most = max(most, scores_computed(rows.stop - rows.start, real, window, at + rows.start, block))
    return most / (queries * keys)


def _places(given: Mapping[str, Any]) -> set[tuple[int, int]]:
    """Where the first query stands in a block's keys, and how many of these are real, on the ranks of a ring: those that have less to do
    wait for the one that has most."""
    found = set()
    for place in range(_ranks(given["start"], given["first"])):
        start, first, real = (_number_at(given[name], place) for name in ("start", "first", "real"))
        found.add((start + given["offset"] - first, real))
    return found


def _number_at(number: object, place: int) -> int:
    """A number of a tile, on the rank at this place of the one axis that it is of."""
    if not isinstance(number, Node):
        assert isinstance(number, int)
        return number
    if number.target is spmd.coordinate:
        return place

    def at(item: object) -> object:
        return [at(one) for one in item] if isinstance(item, list | tuple) else _number_at(item, place)

    return number.target(*map(at, number.args))  # type: ignore[operator]


def _ranks(*numbers: object) -> int:
    """How many ranks there are along the axis that numbers of tiles are of; 1 if they are of none."""
    found = [1]
    for number in numbers:
        if not isinstance(number, Node) or number.target is spmd.coordinate:
            continue
        if number.target is spmd.ring_place:
            found.append(cast(int, number.args[2]))
        else:
            _, counts, places = cast(tuple[int, Sequence[int], Sequence[object]], number.args)
            alone = isinstance(places[0], Node) and places[0].target is spmd.coordinate
            found.append(counts[0] if alone else _ranks(*places))
    return max(found)


# Sequential operators: the number of kernels that one call runs in a row, and the share of its operands that a turn reads.


STEP: Final[Mapping[str, int]] = {"lstm": 16, "gru": 14, "tanh": 5, "relu": 5}
"""Kernels of one step of `meshc.rnn`, a product among them; backward has about twice as many."""

KERNELS_OF_A_CHUNK: Final = 4
"""Kernels of the gated delta rule per chunk of positions."""

def argument(node: Node, name: str) -> object:
    """An argument of a call of one of meshc's operators, by name."""
    return node.args[place_of(node, name)]


def operand_shares(node: Node) -> dict[Node, float]:
    """Operands that are read in part only -> the share that is read."""
    if ir.op_name(node) == "meshc.in_turn":
        made, ranks = cast(Sequence[Node], node.args[0]), cast(int, argument(node, "ranks"))
        return dict.fromkeys(made, 1 - (ranks - 1) / len(made))
    names = turns.PARTED.get(ir.op_name(node), ())
    parts = cast(int, argument(node, "parts")) if names else 1
    found = [argument(node, name) for name in names]
    return {operand: 1 / parts for operand in found if isinstance(operand, Node)}


def kernels(node: Node, on_cpu: bool) -> int:
    """Number of kernels that one call runs one after another."""
    counted = KERNELS.get(ir.op_name(node).replace("_turn", ""))  # a turn's are those of all steps of its part
    return 1 if counted is None else counted(node, on_cpu)


def _shape(node: Node, name: str) -> tuple[int, ...]:
    producer, index = ir.value_of(cast(Node, argument(node, name)))
    return ir.records(producer)[index].shape


def _rnn(name: str, times: int) -> Callable[[Node, bool], int]:
    return lambda node, on_cpu: times * STEP[cast(str, argument(node, "kind"))] * _shape(node, name)[0]


def _recurrence(node: Node, on_cpu: bool) -> int:
    """Kernels of t steps: t on a CPU; elsewhere twice the square root of t, since stretches run in parallel."""
    steps = _shape(node, "a")[cast(int, argument(node, "dim"))]
    return steps if on_cpu or not steps else 2 * (isqrt(steps - 1) + 1)


def _recurrence_end(node: Node, on_cpu: bool) -> int:
    return 1 + _shape(node, "a")[cast(int, argument(node, "dim"))]


def _delta_rule(node: Node, on_cpu: bool) -> int:
    return KERNELS_OF_A_CHUNK * -(-_shape(node, "k")[-2] // delta_rule_chunks.LENGTH)


KERNELS: Final[Mapping[str, Callable[[Node, bool], int]]] = {
    **{f"meshc.delta_rule{kind}": _delta_rule for kind in ("", "_backward", "_end", "_ends", "_state")},
    "meshc.recurrence": _recurrence,
    "meshc.recurrence_backward": _recurrence,
    "meshc.recurrence_end": _recurrence_end,
    "meshc.rnn": _rnn("x", 1),
    "meshc.rnn_backward": _rnn("kept", 2),
}
