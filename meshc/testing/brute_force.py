"""Brute-force proof of a sharding rule: each allowed split runs on every rank, and the joined results are compared.

Padding of operands holds NaN, or an index out of range. Where a reduction may be deferred past the operator, operands come in partial.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from meshc.cost.devices import devices_of
from meshc.ir import Record, record, set_record, value_of
from meshc.ir.functions import Function
from meshc.ir.graph import placeholders, results_of
from meshc.ir.mesh import Mesh, axis_sizes
from meshc.ir.sharding import Part, Sharding, is_padded, tile_sizes
from meshc.passes.partition.partition import Partitioner
from meshc.passes.partition.turn_choice import TurnPricing
from meshc.passes.phases.assignment import Assignment
from meshc.passes.phases.factor_names import FactorNames
from meshc.passes.phases.factors import Factors, Instance, Token
from meshc.passes.place.factorize import factorize
from meshc.passes.place.token_shardings import sharding_by_tokens
from meshc.program.program import Port, Stage
from meshc.rules.partial import Deferral, deferrals
from meshc.rules.roles import check_roles
from meshc.rules.rule import Turns
from meshc.runtime.simulator.simulate import run_stage
from meshc.testing.rank_tiles import assemble, owned_indices, tiles

aten = torch.ops.aten
Chosen = dict[Token, tuple[str, ...]]
MESHES = (Mesh("a=2"), Mesh("a=3"))
BOTH = Mesh("a=2,b=3")
CLOSE = {
    torch.bfloat16: 2e-2,
    torch.float16: 1e-2,
    torch.complex32: 1e-2,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
}
"""How far results may be apart, relatively and absolutely, if a tensor of this dtype takes part; 1e-9 if none does."""


@dataclass(frozen=True)
class Sample:
    """One call of an operator. `refine` cuts dims into factors, as views elsewhere in a graph would: operand (or ~result) -> shape.

    `defined` is false for operators whose results hold anything (`empty`): only shapes are compared. `stand_in` computes what is expected
    where CPUs have no kernel of the operator's.
    """

    op: Function
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    refine: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    defined: bool = True
    stand_in: Function | None = None

    @property
    def name(self) -> str:
        return str(self.op).removesuffix(".default")


@dataclass
class OneOp:
    """A graph of one operator, solved into factors."""

    graph: Graph
    node: Node
    factors: Factors
    names: FactorNames
    tensors: list[Tensor]
    expected: list[Tensor | None]
    defined: bool

    @property
    def instance(self) -> Instance:
        return self.factors.instances[self.node]

    def tokens(self) -> list[Token]:
        """What may be split; of two that a window ties, the one that the rule tiles."""
        read = {(other, 0) for other, _ in self.instance.rule.windows.values()}
        return [token for token, size in self.instance.size.items() if token not in self.instance.whole | read and size > 1]

    def with_tied(self, chosen: Chosen) -> Chosen:
        """Axes that split a token split the one that a window ties to it."""
        return {**chosen, **{self.instance.tied[token]: axes for token, axes in chosen.items() if token in self.instance.tied}}


def build(sample: Sample) -> OneOp:
    graph = Graph()
    tensors: list[Tensor] = []
    nodes: list[Node] = []

    def visit(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            tensors.append(argument)
            nodes.append(graph.placeholder(f"x{len(nodes)}"))
            set_record(nodes[-1], Record(tuple(argument.shape), argument.dtype))
            return nodes[-1]
        if isinstance(argument, list | tuple):
            return type(argument)(visit(item) for item in argument)
        return argument

    args, kwargs = visit(tuple(sample.args)), {key: visit(value) for key, value in sample.kwargs.items()}
    made = (sample.stand_in or sample.op)(*sample.args, **sample.kwargs)
    node = graph.call_function(sample.op, args, kwargs)
    results: list[Node | None] = [node]
    several = isinstance(made, list | tuple)
    expected = list(made) if several else [made]
    found = [Record(tuple(t.shape), t.dtype) if isinstance(t, Tensor) else Record() for t in expected]
    set_record(node, tuple(found) if several else found[0])
    if several:
        results = []
        for index, item in enumerate(found):
            results.append(graph.call_function(operator.getitem, (node, index)) if item.dtype is not None else None)
            if item.dtype is not None:
                set_record(results[-1], item)  # type: ignore[arg-type]
    for position, shape in sample.refine.items():
        view = graph.call_function(aten.view.default, (nodes[position] if position >= 0 else results[~position], list(shape)))
        set_record(view, Record(tuple(shape), torch.float64))
    graph.output(tuple(result for result in results if result is not None))
    factors = factorize(graph)
    names = FactorNames({factor: f"f{factor}" for factor in factors.size})
    return OneOp(graph, node, factors, names, tensors, expected, sample.defined)


def choices(one: OneOp, most_pairs: int | None = None) -> Iterator[tuple[Mesh, Chosen]]:
    """No split; each token on an axis of 2 and of 3; each two tokens (and each token twice) on two axes.

    If there are more than `most_pairs` choices on two axes, that many of them, evenly spread over all.
    """
    yield BOTH, {}
    for mesh, token in itertools.product(MESHES, one.tokens()):
        yield mesh, {token: ("a",)}
    found = list(pairs(one))
    count = len(found) if most_pairs is None else min(most_pairs, len(found))
    for index in range(count):
        yield BOTH, found[index * len(found) // count]


def pairs(one: OneOp) -> Iterator[Chosen]:
    """Each two tokens on two axes, and each token on both."""
    tokens = one.tokens()
    for first, second in itertools.product(tokens, tokens):
        if first != second:
            yield {first: ("a",), second: ("b",)}
    for token in tokens:
        for axes in (("a", "b"), ("b", "a")):
            if tile_sizes(one.instance.size[token], [BOTH.size(axes[0])])[-1] > 1:
                yield {token: axes}


def run_on_ranks(
    one: OneOp, mesh: Mesh, chosen: Chosen, *, partial: Deferral | None = None, zero: bool = False, turns: Turns | None = None
) -> list[Tensor | None]:  # fmt: skip
    """The results put together from all ranks. `partial`: operands that are so over the axis p; `zero`: padding known to be zero; `turns`:
    in which its steps are taken."""
    sizes = axis_sizes(mesh)
    instance, node, chosen = one.instance, one.node, one.with_tied(chosen)
    assignment = Assignment(one.factors, one.names, sizes, turns={} if turns is None else {node: turns})
    waits = () if partial is None else (("p", partial.reduction),)
    left = (("p", partial.left),) if partial is not None and partial.left else ()
    waiting = () if partial is None else partial.positions
    wanted = []
    for position, (value, dims) in enumerate(zip(instance.values, instance.operands, strict=True)):
        want = sharding_by_tokens(assignment.whole(value), dims, chosen)
        wanted.append(replace(want, partial=waits if position in waiting else ()))
    given = []
    for index, dims in enumerate(instance.results):
        over = dict.fromkeys((axis, how) for token, how in instance.sums[index].items() for axis in chosen.get(token, ()))
        over.update(dict.fromkeys(left))
        given.append(replace(sharding_by_tokens(assignment.whole((node, index)), dims, chosen), partial=tuple(over)))
        assignment.given[(node, index)] = given[-1]
    if instance.kind != "layout":
        assignment.wanted[node], assignment.chosen[node] = tuple(wanted), chosen
    inputs, values = [], []
    for position, (placeholder, tensor) in enumerate(zip(placeholders(one.graph), one.tensors, strict=True)):
        found = record(placeholder)
        sharding = wanted[position]
        if zero:
            padded = [(d, p) for d, p, part in sharding.parts() if is_padded(part, sizes)]
            sharding = replace(sharding, zero=frozenset(padded))
        assignment.given[(placeholder, 0)] = sharding
        inputs.append(Port("input", placeholder.name, found.shape, found.dtype or torch.float64, sharding))
        values.append(tiles(tensor, sharding, mesh, seed=position))
    kept = [value_of(result)[1] for result in results_of(one.graph)]
    local = Partitioner(one.graph, assignment, inputs, [given[index] for index in kept], guarded="cpu").build_graph()
    stage = Stage("main", local, (), ())
    rows = [[column[rank] for column in values] for rank in range(mesh.world_size)]
    results = run_stage(stage, rows, mesh, sizes, observe=lambda n, seen: check_record(n, seen, mesh))
    found_whole: list[Tensor | None] = [None] * len(one.expected)
    for position, index in enumerate(kept):
        found_whole[index] = assemble([row[position] for row in results], given[index], mesh, agree=one.defined)
    return found_whole


def check_record(node: Node, values: list[Any], mesh: Mesh) -> None:
    """A per-rank node is what its record says: shape, dtype, and zero where padding is said to be zero."""
    found = node.meta.get("meshc")
    if not isinstance(found, Record) or found.dtype is None:
        return
    sizes = axis_sizes(mesh)
    for rank, value in enumerate(values):
        assert tuple(value.shape) == found.shape, f"{node.name} is {tuple(value.shape)}, its record says {found.shape}"
        assert value.dtype == found.dtype, f"{node.name} is {value.dtype}, its record says {found.dtype}"
        if found.sharding is not None:
            _check_zero(node, value, found.sharding, sizes, mesh.coordinates(rank))


def _check_zero(node: Node, value: Tensor, sharding: Sharding, sizes: Mapping[str, int], at: Mapping[str, int]) -> None:
    parts: list[tuple[int, int, Part]] = list(sharding.parts())
    held = [owned_indices(part, sizes, at) for _, _, part in parts]
    x = value.reshape([length for _, length in held])
    for position, (dim, place, _) in enumerate(parts):
        if (dim, place) in sharding.zero:
            indices, length = held[position]
            rest = x.narrow(position, len(indices), length - len(indices))
            real = tuple(slice(0, len(i)) if k != position else slice(None) for k, (i, _) in enumerate(held))
            assert not rest[real].any(), f"{node.name}: padding of dim {dim} is said to be zero and is not"


def prove(sample: Sample, most_pairs: int | None = None) -> int:
    """Raises AssertionError if a split that the rule allows changes the result. Returns the number of splits that ran."""
    one = build(sample)
    rule = one.instance.rule
    check_roles(rule, one.expected)
    knows = rule.kind == "layout" or rule.clean or rule.self_masked or any(one.instance.sums)  # what lies in padding matters
    ran = 0
    for mesh, chosen in choices(one, most_pairs):
        for zero in (False, True) if chosen and knows else (False,):
            _try(sample, one, mesh, chosen, f"{_split_text(one, chosen)} on {mesh}{', padding zero' if zero else ''}", zero=zero)
        for turns in _turns(one, mesh, chosen):
            _try(sample, one, mesh, chosen, f"{_split_text(one, chosen)} on {mesh}, in {turns}", turns=turns)
        ran += 1
    if rule.settles:  # partition finishes what is partial before these; what may come in partial is said of the operator itself
        one.factors.instances[one.node] = replace(one.instance, rule=replace(rule, kind="compute", settles=False))
    for deferral in deferrals(one.node, rule):
        if not all(one.tensors[position].is_floating_point() for position in deferral.positions):
            continue
        for token in [None, *one.tokens()]:
            chosen = {token: ("a",)} if token else {}
            if any(sums.get(token, deferral.left) != deferral.left for sums in one.instance.sums):  # type: ignore[arg-type]
                continue  # partial over two reductions at once has no meaning
            _try(sample, one, Mesh("a=3,p=2"), chosen, f"{_split_text(one, chosen)}, partial: {deferral}", partial=deferral)
            ran += 1
    return ran


def _turns(one: OneOp, mesh: Mesh, chosen: Chosen) -> list[Turns]:
    """In how many parts its steps may be taken in turn, if they are split."""
    pricing = TurnPricing(one.factors, mesh, axis_sizes(mesh), devices_of(mesh).slowest())
    return [way for way in pricing.ways(one.instance, chosen) if way is not None]


def _try(sample: Sample, one: OneOp, mesh: Mesh, chosen: Chosen, said: str, **how: Any) -> None:
    try:
        found = run_on_ranks(one, mesh, chosen, **how)
    except AssertionError as error:
        raise AssertionError(f"{said}: {error}") from error
    check(sample, one, found, said)


def _split_text(one: OneOp, chosen: Chosen) -> str:
    letters = ", ".join(f"{letter}.{position}: {'/'.join(axes)}" for (letter, position), axes in chosen.items())
    return f"{one.node.target} with {letters or 'nothing'} split"


def check(sample: Sample, one: OneOp, found: list[Tensor | None], said: str) -> None:
    expected = [e for e in one.expected if isinstance(e, Tensor)]
    got = [g for g in found if g is not None]
    assert len(expected) == len(got)
    dtypes = {t.dtype for t in (*one.tensors, *expected)}
    close = max((tolerance for dtype, tolerance in CLOSE.items() if dtype in dtypes), default=1e-9)
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        a = a if sample.defined else b.reshape(a.shape)
        where = f"{said}: result {index} differs. "
        bound = 0.0 if b.is_floating_point() and b.itemsize == 1 else close
        torch.testing.assert_close(a, b, rtol=bound, atol=bound, equal_nan=True, msg=where.__add__)
