"""Bytes that recurrences send along a split sequence, from the graphs of a program and by the formulas of `docs/recurrences.md`.

                    at once, and joined: gathered           in turns of c parts: sent
    rnn                                                     (c + n - 2) / c S           backward as much
    recurrence      2 S n            backward 4 S n         (c + n - 2) / c S           backward that and S
    delta rule      (P + S) n        backward (P + 2 S) n   (c + n - 2) / c S           backward twice that and S
    running sums    S n              backward S n           (products, maxima and the like too; indices of maxima are S n more)

Counts are elements per rank, for n ranks and a state of S elements over all rows, channels and heads; P are products of keys by keys.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch.fx import Node

from meshc.cost.links import payload
from meshc.cost.peak_memory import runs
from meshc.ir import is_getitem, record, records, spmd
from meshc.ir.schemas import named_arguments
from meshc.ops import delta_rule as _delta  # noqa: F401 - registers them
from meshc.ops import recurrence as _recurrence  # noqa: F401 - likewise
from meshc.ops import rnn as _rnn  # noqa: F401 - likewise
from meshc.ops import scan_back as _scan_back  # noqa: F401 - likewise
from meshc.program.program import PlainProgram

aten, meshc = torch.ops.aten, torch.ops.meshc

TURNS: Final[Mapping[object, str]] = {
    meshc.rnn_turn.default: "rnn", meshc.rnn_turn_backward.default: "rnn",
    meshc.recurrence_turn.default: "recurrence", meshc.recurrence_backward_turn.default: "recurrence",
    meshc.delta_rule_turn.default: "delta rule", meshc.delta_rule_state_turn.default: "delta rule",
    meshc.delta_rule_backward_turn.default: "delta rule",
}  # fmt: skip
HANDED_ONCE: Final = (meshc.recurrence_backward_turn.default, meshc.delta_rule_backward_turn.default)
"""Turns that also read each rank's initial state, which is sent separately."""
ENDS: Final[Mapping[object, str]] = {
    meshc.recurrence_end.default: "recurrence", meshc.delta_rule_end.default: "delta rule", meshc.delta_rule_ends.default: "delta rule",
}  # fmt: skip
"""Operators that compute the final state of a rank's stretch, which all ranks gather -> kind of recurrence."""
SCANS: Final[Mapping[object, str]] = {
    aten.cumsum.default: "running sum", meshc.cumsum_back.default: "running sum", aten.cumprod.default: "running product",
    aten.logcumsumexp.default: "running log-sum", meshc.logcumsumexp_back.default: "running log-sum",
    aten.cummax.default: "running maximum", aten.cummin.default: "running minimum",
}  # fmt: skip
"""Scans, whose last position in a tile (first position, if scanned from the end) is the final state of the stretch -> kind."""
STATES: Final = ("handed", "before", "begin")
"""Arguments of a turn that may come from the previous rank."""
THROUGH: Final = (aten.reshape.default, aten.add.Tensor, aten.stack.default, aten.unsqueeze.default, aten.cat.default)
"""Operators that reshape sent values, or add values from several ranks."""


@dataclass(frozen=True)
class Recurrence:
    """Traffic of one layer's recurrence, in one call, on one rank.

    path      path of its module
    kind      "rnn", "recurrence", "delta rule", or the kind of scan
    axes      axes that split the sequence;  ranks  number of ranks along them
    parts     number of parts in which rows, channels or heads are sent on; 0 if all ranks run their stretches at once
    sent      (forward, backward) bytes by the program: bytes that a rank sends of halos, results of gathers
    formula   (forward, backward) bytes by the formula
    """

    path: str
    kind: str
    axes: tuple[str, ...]
    ranks: int
    parts: int
    sent: tuple[int, int] = (0, 0)
    formula: tuple[int, int] = (0, 0)

    @property
    def turns(self) -> int:
        """Number of turns; 0 if all ranks run their stretches at once."""
        return self.parts + self.ranks - 1 if self.parts else 0


_Key = tuple[str, str, tuple[str, ...], int, int]


def traffic(program: PlainProgram) -> list[Recurrence]:
    """Traffic of every layer whose steps an axis splits, in the program's order."""
    often = runs(program)
    sent: dict[_Key, list[int]] = defaultdict(lambda: [0, 0])
    formula: dict[_Key, list[int]] = defaultdict(lambda: [0, 0])
    for stage in program.stages.values():
        counted: set[Node] = set()
        for node in stage.graph.nodes:
            if node.target in TURNS:
                key, message, numbers = _of_turn(node, counted)
            elif node.target is spmd.all_gather and (ends := _before(node.all_input_nodes, ENDS)):
                key, message, numbers = _of_gather(node, ends[0], program)
            elif node.target is spmd.all_gather and (scan := _find_scan(node)) is not None:
                key, message, numbers = _of_scan(node, scan, program)
            else:
                continue
            made = records(node)[0]
            phase = int(made.phase != "forward")
            assert made.dtype is not None
            sent[key][phase] += often[stage.name] * sum(payload(one, program.axis_sizes) for one in message)
            formula[key][phase] += often[stage.name] * round(numbers * made.dtype.itemsize)
    return [Recurrence(*key, (one[0], one[1]), (formula[key][0], formula[key][1])) for key, one in sent.items()]


def _of_turn(node: Node, counted: set[Node]) -> tuple[_Key, list[Node], float]:
    """The halos that a turn reads and no earlier turn has read, and, for the first turn, the elements of all turns by the formula."""
    args = named_arguments(node)
    parts, ranks = args["parts"], args["ranks"]
    assert isinstance(parts, int) and isinstance(ranks, int)
    states = [state for name in STATES if isinstance(state := args.get(name), Node)]
    halos = [one for one in _before(states, (spmd.halo,)) if one not in counted]
    counted.update(halos)
    times = (parts + ranks - 2) / parts + (node.target in HANDED_ONCE) if args["slot"] == 0 else 0.0
    key = records(node)[0].source.module, TURNS[node.target], _axes(args["place"]), ranks, parts
    return key, halos, times * _state(args)


def _of_gather(node: Node, end: Node, program: PlainProgram) -> tuple[_Key, list[Node], float]:
    """A gather of the final states of stretches, and its elements by the formula."""
    args, axes = named_arguments(end), tuple(node.args[1])  # type: ignore[arg-type]
    ranks, state = prod(program.axis_sizes[axis] for axis in axes), _state(args)
    if ENDS[end.target] == "recurrence":
        each = (4 if args["reverse"] else 2) * state
    else:
        keys = _shape(args["k"])
        each = prod(keys[:-2]) * keys[-1] ** 2 + state * (2 if end.target is meshc.delta_rule_ends.default else 1)
    return (record(node).source.module, ENDS[end.target], axes, ranks, 0), [node], each * ranks


def _find_scan(gather: Node) -> Node | None:
    """The scan whose last positions are gathered: one position of its result, or of its indices of extremes, in a new dim."""
    x, wanted = gather.args[0], [aten.unsqueeze.default, aten.slice.Tensor]
    while isinstance(x, Node) and (is_getitem(x) or x.target in (*wanted[:1], aten.add.Tensor)):
        if x.target in wanted:
            wanted.remove(x.target)
        elif wanted:
            return None
        x = x.args[0]
    return x if isinstance(x, Node) and x.target in SCANS and not wanted else None


def _of_scan(node: Node, scan: Node, program: PlainProgram) -> tuple[_Key, list[Node], float]:
    """A gather of one position of each scan's stretch, and its elements by the formula."""
    axes, args = tuple(node.args[1]), named_arguments(scan)  # type: ignore[arg-type]
    shape, dim = _shape(args["self"] if "self" in args else args["x"]), args["dim"]
    assert isinstance(dim, int)
    ranks = prod(program.axis_sizes[axis] for axis in axes)
    return (record(node).source.module, SCANS[scan.target], axes, ranks, 0), [node], prod(shape) / max(1, shape[dim]) * ranks


def _state(args: dict[str, Any]) -> int:
    """Elements of the state of all rows of a rank."""
    if "weight" in args:
        rows = _shape(args["x"] if "x" in args else args["grad"])[1]
        return (2 if args["kind"] == "lstm" else 1) * rows * _shape(args["weight"])[1]
    if "k" in args:
        keys, values = _shape(args["k"]), _shape(args["v"])
        return prod(keys[:-2]) * keys[-1] * values[-1]
    shape, dim = _shape(args["a"]), args["dim"]
    assert isinstance(dim, int)
    return prod(shape) // max(1, shape[dim])


def _before(values: Sequence[Node], targets: Collection[object]) -> list[Node]:
    """Calls of `targets` that the values are computed from, looked up through the operators of THROUGH."""
    found, left = [], list(values)
    while left:
        one = left.pop()
        if one.target in targets:
            found.append(one)
        elif one.target in THROUGH or is_getitem(one):
            left += one.all_input_nodes
    return found


def _axes(place: object) -> tuple[str, ...]:
    """The axes of a rank's position in the chain."""
    if not isinstance(place, Node):
        return ()
    if place.target is spmd.coordinate:
        return (str(place.args[0]),)
    return tuple(axis for one in place.all_input_nodes for axis in _axes(one))


def _shape(x: object) -> tuple[int, ...]:
    assert isinstance(x, Node)
    return record(x).shape
