"""Instances of a dynamic program: its stages with numbers for symbolic sizes; the sizes from shapes of inputs, and checks of sizes.

    t: "f32[batch n_batch/dp, seq n_seq]" = aten.reshape(x, [-(-n_batch // 2), n_seq])      at batch 7, seq 33
    t: "f32[batch 7/dp, seq 33]" = aten.reshape(x, [4, 33])
"""

from __future__ import annotations

import ast
import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, cast

from torch.fx import Graph, Node
from torch.fx.node import Argument

from meshc.errors import InputError
from meshc.ir import KEY, Record
from meshc.ir.bounds import brief_repr
from meshc.ir.graph import copied_node
from meshc.ir.likeness import like
from meshc.ir.sharding import Sharding
from meshc.ir.sizes import Number, Relation, expression_of, parse
from meshc.ir.sizes import at as number_at
from meshc.program.program import PlainProgram, Port, Stage, TracedGraph

KEPT = 16
"""Instances of a program that are cached; beyond that the least recently used is dropped."""
SIGNS: Final[Mapping[str, Callable[[Number, Number], bool]]] = {
    "==": operator.eq, "!=": operator.ne, ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt,
}  # fmt: skip


def at(program: PlainProgram, sizes: Mapping[str, int]) -> PlainProgram:
    """The program for calls whose dynamic sizes, by name, are `sizes`. Raises InputError for sizes that the program does not serve."""
    if not program.dynamic:
        return program
    check(program, sizes)
    return substitute_sizes(program, {size.symbol: sizes[size.name] for size in program.dynamic})


def substitute_sizes(program: PlainProgram, values: Mapping[str, int]) -> PlainProgram:
    """The program with these sizes, by symbol, substituted, whether the program serves them or not."""
    traced = program.traced
    return replace(
        program,
        stages={name: substitute_in_stage(stage, values) for name, stage in program.stages.items()},
        inputs=substitute_in_ports(program.inputs, values),
        outputs=substitute_in_ports(program.outputs, values),
        dynamic=(),
        constraints=(),
        traced=None if traced is None else TracedGraph(lambda: substitute_in_stage(traced.stage, values)),
    )


def sizes_of(program: PlainProgram, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The dynamic sizes of inputs with these whole shapes, by name. Raises InputError, naming all that do not agree or are missing."""
    found: dict[str, tuple[int, str]] = {}
    names = {size.symbol: size.name for size in program.dynamic}
    faults: list[str] = []
    for port in program.inputs:
        if port.kind != "input" or port.name not in shapes:
            continue
        shape = shapes[port.name]
        if len(shape) != len(port.shape):
            faults.append(f"{port.name} has {len(shape)} dims, the program takes {len(port.shape)}")
            continue
        for dim, (open_size, size) in enumerate(zip(port.shape, shape, strict=True)):
            name = names.get(str(open_size))
            if name is None:
                continue
            known, where = found.setdefault(name, (int(size), f"dim {dim} of {port.name}"))
            if known != size:
                faults.append(f"{name} is {known} in {where} and {size} in dim {dim} of {port.name}")
    faults += [f"no input has {name}" for name in names.values() if name not in found] if not faults else []
    if faults:
        raise InputError("sizes do not fit the program:\n  " + "\n  ".join(faults))
    return {name: size for name, (size, _) in found.items()}


def program_for_shapes(program: PlainProgram, shapes: Mapping[str, Sequence[int]]) -> PlainProgram:
    """The program for inputs of these whole shapes, by name."""
    return at(program, sizes_of(program, shapes)) if program.dynamic else program


def graph_at(graph: Graph, program: PlainProgram, shapes: Mapping[str, Sequence[int]]) -> Graph:
    """A graph of the program, global or local, for inputs of these whole shapes."""
    if not program.dynamic:
        return graph
    sizes = sizes_of(program, shapes)
    return substitute_in_graph(graph, {size.symbol: sizes[size.name] for size in program.dynamic})


def tried_sizes(program: PlainProgram) -> Iterator[dict[str, int]]:
    """Sizes of what is open, by name, at which a program that may be called with any is looked at: its hints, and the ends of the ranges
    that it accepts. Of one with nothing open there is one, without a name."""
    yield {size.name: size.hint for size in program.dynamic}
    for end in ("low", "high") if program.dynamic else ():
        sizes = {size.name: getattr(size, end) for size in program.dynamic}
        with contextlib.suppress(InputError):
            check(program, sizes)
            yield sizes


def check(program: PlainProgram, sizes: Mapping[str, int]) -> None:
    """Raises InputError naming every size out of range and every constraint that does not hold."""
    faults = [
        f"{size.name} is {sizes[size.name]}; the program serves {size}"
        for size in program.dynamic
        if not size.low <= sizes[size.name] <= size.high
    ]
    values = {size.symbol: sizes[size.name] for size in program.dynamic}
    if not faults:
        faults = [f"{text} does not hold at {_sizes_text(sizes)}" for text in program.constraints if not holds(text, values)]
    if faults:
        raise InputError("sizes do not fit the program:\n  " + "\n  ".join(faults))


def _sizes_text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def expressions(text: str, hints: Mapping[str, int]) -> Relation:
    """A constraint's sign and sides."""
    left, sign, right = relation(text)
    a, b = (parse(side, hints) for side in (left, right))
    return sign, expression_of(a), expression_of(b)


def holds(text: str, values: Mapping[str, int]) -> bool:
    left, sign, right = relation(text)
    a, b = (number_at(parse(side, values), values) for side in (left, right))
    return SIGNS[sign](a, b)


def relation(text: str) -> tuple[str, str, str]:
    """(left side, sign, right side) of a constraint. Raises ValueError for a text that is none."""
    for sign in SIGNS:
        left, found, right = text.partition(f" {sign} ")
        if found:
            try:
                ast.parse(left, mode="eval"), ast.parse(right, mode="eval")
            except (SyntaxError, RecursionError, MemoryError) as error:
                raise ValueError(f"{brief_repr(text)} relates no two sizes: {error}") from None
            return left, sign, right
    raise ValueError(f"{brief_repr(text)} relates no two sizes")


def substitute_in_stage(stage: Stage, values: Mapping[str, int]) -> Stage:
    return replace(stage, graph=substitute_in_graph(stage.graph, values))


def substitute_in_graph(open_graph: Graph, values: Mapping[str, int]) -> Graph:
    graph = Graph()
    copies: dict[Node, Node] = {}

    def number(argument: Argument) -> Argument:
        if isinstance(argument, Node):
            return copies[argument]
        return cast(Argument, number_at(argument, values))

    for node in open_graph.nodes:
        made = copied_node(graph, node, copies.__getitem__, number)
        if made.name != node.name:
            made.name = node.name
        if KEY in node.meta:
            found = node.meta[KEY]
            made.meta[KEY] = tuple(_record(item, values) for item in found) if isinstance(found, tuple) else _record(found, values)
        copies[node] = made
    return graph


def _record(record: Record, values: Mapping[str, int]) -> Record:
    return like(record, shape=_shape(record, values), sharding=record.sharding and sharding_at(record.sharding, values))


def _shape(one: Record | Port, values: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(number_at(extent, values) for extent in one.shape)


def sharding_at(sharding: Sharding, values: Mapping[str, int]) -> Sharding:
    dims = tuple(tuple(replace(part, size=number_at(part.size, values)) for part in parts) for parts in sharding.dims)
    return replace(sharding, dims=dims)


def substitute_in_ports(ports: Sequence[Port], values: Mapping[str, int]) -> tuple[Port, ...]:
    return tuple(
        replace(port, shape=_shape(port, values), sharding=port.sharding and sharding_at(port.sharding, values)) for port in ports
    )
