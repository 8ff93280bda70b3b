"""Faults of in-place writes: reads of overwritten values, and results that share memory.

    t: "f32[8, 4]" = aten.t(w)
    adam_many_: "int" = meshc.adam_many_([w], [g], ...)
    h: "f32[4, 8]" = aten.mm(x, t)                 refused: t is a view of w, which is overwritten
    return {"parameter:w": v}                      refused: v is in the memory of another parameter

After a write the name of the operand means the new value, which lines of the update may read, and lines of forward and backward may not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch.fx import Node

from meshc import ir
from meshc.ir import Source, spmd
from meshc.ir.functions import Target
from meshc.ir.keys import kind_of
from meshc.ir.schemas import written_operands
from meshc.ops.in_place import WRITERS
from meshc.program.program import Stage
from meshc.text.allowed_operators import spelling

OWN = ("parameter", "buffer", "state")
"""Kinds of ports with memory that the program may overwrite."""
Memory = frozenset[str]
"""Owners of the memory that a value may be in: keys of the stage's inputs, and names of values with memory of their own."""


def faults(stage: Stage, may_view: Callable[[Target], bool]) -> Iterator[tuple[str, str]]:
    """(value, message) for every fault. `may_view`: whether an operator's result may share memory with its operands."""
    memory = memories(stage, may_view)
    written: dict[str, Node] = {}
    new: set[Node] = set()
    for node in stage.graph.nodes:
        if node.op != "call_function":
            continue
        for operand in node.all_input_nodes:
            gone = sorted(memory[operand] & written.keys())
            if gone and (operand not in new or _is_early(node)):
                told = f"it reads {operand}, and {written[gone[0]]} above has written in the memory of {gone[0]}"
                yield node.name, f"{node.name} = {spelling(node.target)}(...): {told}: what reads the old values stands before that"
                break
        if all(operand in new or not memory[operand] & written.keys() for operand in node.all_input_nodes):
            new.add(node)
        if changed := writes(node):
            places = frozenset().union(*(memory[operand] for operand in changed))
            new -= {one for one in new if memory[one] & places}
            new |= set(changed)
            written.update(dict.fromkeys(places, node))
    yield from _faults_of_results(stage, memory)


def _is_early(node: Node) -> bool:
    """Whether the record of a line says that it belongs to forward or backward."""
    told = ir.records(node)[0]
    return told.phase == "backward" or told.phase == "forward" and (told.source != Source() or bool(told.reason))


def memories(stage: Stage, may_view: Callable[[Target], bool]) -> Mapping[Node, Memory]:
    found: dict[Node, Memory] = {}
    keys = iter(stage.inputs)
    for node in stage.graph.nodes:
        if node.op == "placeholder":
            found[node] = frozenset({next(keys)})
        elif node.op == "call_function" and ir.is_integer(node):
            found[node] = frozenset()
        elif ir.is_getitem(node) and found[ir.value_of(node)[0]] == {ir.value_of(node)[0].name}:
            found[node] = frozenset({f"{node.args[0]}.{node.args[1]}"})  # each result has memory of its own
        elif spmd.is_host_copy(node.target):
            found[node] = found[node.args[1]] if len(node.args) == 2 else frozenset({node.name})
        elif node.op == "call_function":
            inside: Memory = frozenset().union(*(found[one] for one in node.all_input_nodes)) if may_view(node.target) else frozenset()
            found[node] = inside or frozenset({node.name})
    return found


def writes(node: Node) -> list[Node]:
    """The operands that a line overwrites."""
    if spmd.is_host_copy(node.target):
        return list(node.args[1:])  # type: ignore[arg-type]
    if node.op != "call_function" or node.target not in WRITERS:
        return []
    return [one for one in written_operands(node.target, node.args, {}) if isinstance(one, Node)]


def _faults_of_results(stage: Stage, memory: Mapping[Node, Memory]) -> Iterator[tuple[str, str]]:
    held: dict[str, str] = {}
    for key, value in stage.results().items():
        kind = kind_of(key)
        for place in sorted(memory[value]):
            if kind in OWN and kind_of(place) in OWN and place != key:
                yield f"return {key}", f"{key} leaves as {value}, in the memory of {place}: both would be one"
            elif kind in OWN and (kind_of(place) in OWN or place == value.name) and held.setdefault(place, key) != key:
                yield f"return {key}", f"{key} leaves as {value}, in whose memory {held[place]} leaves too: both would be one"
