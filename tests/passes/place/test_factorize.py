"""Factors are found, not declared: what views, splits and products of common models come apart into."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from meshc.ir import is_getitem, value_of
from meshc.passes.phases.factors import Factors
from meshc.passes.place.factorize import factorize
from tests.graphs import shuffled, trace

aten = torch.ops.aten
ours = torch.ops.meshc


def f(*shape: int) -> Tensor:
    return torch.randn(shape)


def tokens(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


class Solved:
    """A traced function, factorized: `sizes(name)` and `classes(name)` of a placeholder or of a call."""

    def __init__(self, function: Callable[..., object], *tensors: Tensor) -> None:
        self.graph = trace(function, *tensors)
        self.factors = factorize(self.graph)

    def node(self, name: str) -> Node:
        return next(node for node in self.graph.nodes if node.name == name)

    def output(self, index: int = 0) -> Node:
        (output,) = self.graph.find_nodes(op="output")
        found: Node = output.args[0][index]  # type: ignore[index, assignment]
        return found

    def classes(self, name: str | Node) -> list[list[int]]:
        node = self.node(name) if isinstance(name, str) else name
        return [list(dim) for dim in self.factors.dims[value_of(node)]]

    def sizes(self, name: str | Node) -> list[list[int]]:
        return [[self.factors.size[factor] for factor in dim] for dim in self.classes(name)]

    def calls(self, target: object) -> list[Node]:
        return [node for node in self.graph.nodes if node.target is target]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = ours.attention(q, k, v, None, True, 0.5)[0]
    return out


# -------------------------------------------------------------------------------------------------------------------- fused weights


def fused_by_split(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    q, k, v = (part.view(2, 5, 4, 6).transpose(1, 2) for part in F.linear(x, w).split(24, -1))
    return F.linear(attention(q, k, v).transpose(1, 2).reshape(2, 5, 24), out)


def fused_by_view(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    q, k, v = F.linear(x, w).view(2, 5, 3, 4, 6).permute(2, 0, 3, 1, 4).unbind(0)
    return F.linear(attention(q, k, v).transpose(1, 2).reshape(2, 5, 24), out)


@pytest.mark.parametrize("model", [fused_by_split, fused_by_view])
def test_fused_query_key_and_value(model: Callable[..., Tensor]) -> None:
    """The weight's rows are 3 * heads 4 * head 6, its columns hidden; the way out sums over the same heads."""
    found = Solved(model, f(2, 5, 16), f(72, 16), f(16, 24))
    assert found.sizes("w") == [[3, 4, 6], [16]]
    assert found.sizes("out") == [[16], [4, 6]]
    (_, heads, head), _ = found.classes("w")
    assert found.classes("out")[1] == [heads, head]
    assert found.classes("x")[2] == found.classes("w")[1]
    (call,) = found.calls(ours.attention.default)
    for operand in call.args[:3]:
        assert found.classes(operand)[1::2] == [[heads], [head]]
    assert found.factors.dropped == []


def test_the_three_parts_of_a_fused_weight_are_not_split() -> None:
    """They are what split selects from: each rank needs its heads of all three."""
    found = Solved(fused_by_split, f(2, 5, 16), f(72, 16), f(16, 24))
    (split,) = found.calls(aten.split.Tensor)
    instance = found.factors.instances[split]
    last = instance.operands[0][-1]
    assert [(instance.size[token], token in instance.whole) for token in last] == [(3, True), (4, False), (6, False)]


def test_gate_and_up_in_one_weight() -> None:
    def gated(x: Tensor, w: Tensor, down: Tensor) -> Tensor:
        gate, up = F.linear(x, w).chunk(2, -1)
        return F.linear(F.silu(gate) * up, down)

    found = Solved(gated, f(2, 5, 16), f(22, 16), f(16, 11))
    assert found.sizes("w") == [[2, 11], [16]]
    assert found.classes("down")[1] == found.classes("w")[0][1:]


def test_parts_of_unequal_size_keep_the_dim_whole() -> None:
    """A fused weight of 16 query, 8 key and 8 value rows is no product; nothing is cut and nothing may be split."""
    found = Solved(lambda x, w: F.linear(x, w).split([16, 8, 8], -1)[1] * 2, f(5, 12), f(32, 12))
    assert found.sizes("w") == [[32], [12]]
    (split,) = found.calls(aten.split_with_sizes.default)
    instance = found.factors.instances[split]
    assert {instance.size[token] for token in instance.whole} == {32, 16, 8}


# -------------------------------------------------------------------------------------------------------------- views and slices


def test_flattened_rows_are_batch_times_seq() -> None:
    found = Solved(lambda x, w: (x.view(10, 8) @ w).view(2, 5, 3), f(2, 5, 8), f(8, 3))
    (product,) = found.calls(aten.mm.default)
    batch, seq, hidden = (dim[0] for dim in found.classes("x"))
    assert found.classes(product)[0] == [batch, seq]
    assert found.classes("w")[0] == [hidden]
    assert found.classes(found.output())[:2] == [[batch], [seq]]


def test_rotary_halves() -> None:
    """Halves cut the head in two; the two halves share a class, and heads do not mix with it."""

    def rotate(q: Tensor, cos: Tensor) -> Tensor:
        half = torch.cat((-q[..., 3:], q[..., :3]), -1)
        return q * cos + half * cos

    found = Solved(rotate, f(2, 4, 5, 6), f(5, 6))
    assert found.sizes("q") == [[2], [4], [5], [2, 3]]
    assert found.classes("cos") == found.classes("q")[2:]
    lower, upper = found.calls(aten.slice.Tensor)[:2]
    assert found.classes(lower) == found.classes(upper)
    assert found.classes(found.output()) == found.classes("q")


def test_a_slice_at_another_offset_keeps_its_dim_whole() -> None:
    found = Solved(lambda x: x[:, 1:] * 2, f(3, 6))
    assert found.sizes("x") == [[3], [6]]
    (piece,) = [node for node in found.calls(aten.slice.Tensor) if node.meta["meshc"].shape == (3, 5)]
    instance = found.factors.instances[piece]
    assert {instance.size[token] for token in instance.whole} == {6, 5}


def test_a_lone_equal_slice_does_not_cut() -> None:
    """Taking the first half of something is no reason to think of it as halves; where others do, the slice goes along."""
    assert Solved(lambda x: x[:3] * 2, f(6, 5)).sizes("x") == [[6], [5]]
    assert Solved(lambda x: (x[:3] * 2, x.view(2, 3, 5) * 2), f(6, 5)).sizes("x") == [[2, 3], [5]]


def test_grouped_query_attention() -> None:
    """Expanded key-value heads cut the query heads into kv_heads 2 * group 3."""

    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.unsqueeze(2).expand(2, 2, 3, 5, 4).reshape(2, 6, 5, 4) for x in (k, v))
        return attention(q, k, v)

    found = Solved(grouped, f(2, 6, 5, 4), f(2, 2, 5, 4), f(2, 2, 5, 4))
    assert found.sizes("q") == [[2], [2, 3], [5], [4]]
    assert found.sizes("k") == [[2], [2], [5], [4]]
    assert found.classes("k")[1] == found.classes("v")[1] == found.classes("q")[1][:1]


def test_a_reshape_without_common_factors_keeps_its_dims_whole() -> None:
    found = Solved(lambda x: x.view(6, 6) * 2, f(4, 9))
    assert found.sizes("x") == [[4], [9]]
    assert found.factors.dropped == ["view: a reshape without common factors keeps its dims whole"]
    (view,) = found.calls(aten.view.default)
    instance = found.factors.instances[view]
    assert instance.whole == set(instance.size)


def test_dims_of_size_one_have_no_factor() -> None:
    found = Solved(lambda x, w: (x + w).view(1, 3, 1, 5).squeeze(2), f(3, 5), f(1, 5))
    assert found.sizes("w") == [[], [5]]
    assert found.sizes(found.output()) == [[], [3], [5]]
    assert found.classes(found.output())[1:] == found.classes("x")


# ------------------------------------------------------------------------------------------------ one class in two places, conflicts


def test_tied_weights() -> None:
    """The embedding's rows and the logits' columns are one vocabulary."""
    found = Solved(lambda ids, w: F.embedding(ids, w) @ w.t(), tokens(7, 5), f(7, 4))
    assert found.classes(found.output()) == [found.classes("ids")[0], found.classes("w")[0]]


def test_a_gram_matrix_has_one_class_and_two_letters() -> None:
    """X @ X.T: rows and columns of the result are one class, but an axis may still take either, and not both."""
    found = Solved(lambda x: x @ x.t(), f(5, 4))
    rows, columns = found.classes(found.output())
    assert rows == columns == found.classes("x")[0]
    (product,) = found.calls(aten.mm.default)
    instance = found.factors.instances[product]
    (m,), (n,) = instance.results[0]
    assert m != n
    assert instance.factor[m] == instance.factor[n]


def test_factors_that_do_not_nest_are_cut_with_a_reason() -> None:
    """A group norm sees 768 as 32 * 24, attention as 12 * 64: what is asked for more often stays."""

    def both(x: Tensor) -> tuple[Tensor, ...]:
        return x.view(5, 12, 64) * 2, x.view(5, 32, 24) * 3, x.view(5, 12, 64).transpose(1, 2) * 4

    found = Solved(both, f(5, 768))
    assert found.sizes("x") == [[5], [12, 64]]
    assert found.factors.dropped == ["view_1: aten.view.default asks for factors that do not nest with those of other operators"]
    loser = found.factors.instances[found.node("view_1")]
    assert {token[0] for token in loser.whole} == {"i1", "o1", "o2"}
    assert ("i0", 0) not in loser.whole


def test_a_tie_between_factors_that_do_not_nest_is_the_same_in_any_order() -> None:
    def first(x: Tensor) -> tuple[Tensor, ...]:
        return x.view(12, 64) * 2, x.view(32, 24) * 3

    def second(x: Tensor) -> tuple[Tensor, ...]:
        return x.view(32, 24) * 3, x.view(12, 64) * 2

    assert Solved(first, f(768)).sizes("x") == Solved(second, f(768)).sizes("x") == [[12, 64]]


def test_cuts_that_nest_are_all_made() -> None:
    found = Solved(lambda x: (x.view(4, 24) * 2, x.view(12, 8) * 2, x.view(2, 48) * 2), f(96))
    assert found.sizes("x") == [[2, 2, 3, 8]]
    assert found.factors.dropped == []


def lstm(x: Tensor, w_in: Tensor, w_rec: Tensor, h: Tensor, c: Tensor) -> Tensor:
    """An LSTM of width 3 over four steps."""
    steps = []
    for step in x.unbind(0):
        i, g, o, u = (F.linear(step, w_in) + F.linear(h, w_rec)).chunk(4, -1)
        c = torch.sigmoid(g) * c + torch.sigmoid(i) * torch.tanh(u)
        h = torch.sigmoid(o) * torch.tanh(c)
        steps.append(h)
    return torch.stack(steps)


LSTM = (f(4, 5, 6), f(12, 6), f(12, 3), f(5, 3), f(5, 3))


def test_an_unrolled_lstm() -> None:
    """The recurrent weight's rows are 4 gates * width, its columns the same width: one class on two dims, which stay two letters."""
    found = Solved(lstm, *LSTM)
    assert found.sizes("w_in") == [[4, 3], [6]]
    assert found.sizes("w_rec") == [[4, 3], [3]]
    width = found.classes("w_rec")[1]
    assert found.classes("w_rec")[0][1:] == width
    assert found.classes("w_in")[0] == found.classes("w_rec")[0]
    assert found.classes(found.output())[2] == width
    recurrent = [node for node in found.calls(aten.mm.default) if found.classes(node.args[0])[1] == width]  # type: ignore[arg-type]
    for node in recurrent:
        instance = found.factors.instances[node]
        ((k,),) = instance.operands[0][1:]
        assert k not in instance.results[0][1]


# ------------------------------------------------------------------------------------------------------------ any order, any model


def mixture(x: Tensor, w: Tensor, ids: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    """Fused weights, conflicting views, ties, soft and hard slices, all on shared dims."""
    h = F.embedding(ids, table) + x
    q, k, v = F.linear(h, w).split(24, -1)
    a = q.view(2, 5, 4, 6) * 2
    b = k.view(2, 5, 3, 8) * 3
    d = v.view(2, 5, 8, 3) + q.view(2, 5, 8, 3)
    halves = torch.cat((q[..., 12:], q[..., :12]), -1) + v[..., :8].repeat(1, 1, 3)
    flat = (h.view(10, 24) @ h.view(10, 24).t()).view(2, 5, 10)
    return a, b, d, halves, flat, h @ table.t()


MIXTURE = (f(2, 5, 24), f(72, 24), tokens(7, 2, 5), f(7, 24))


def partition_of(graph: Graph, factors: Factors, where: dict[Node, Node]) -> set[frozenset[tuple[str, int, int, int]]]:
    """The classes as sets of places: (original node, result, dim, position)."""
    found: dict[int, set[tuple[str, int, int, int]]] = {}
    for original, node in where.items():
        if is_getitem(node) or node.op == "output":
            continue
        for (owner, result), dims in factors.dims.items():
            if owner is node:
                for dim, classes in enumerate(dims):
                    for position, factor in enumerate(classes):
                        found.setdefault(factor, set()).add((original.name, result, dim, position))
    return {frozenset(places) for places in found.values()}


@pytest.mark.parametrize(
    ("model", "tensors"),
    [(mixture, MIXTURE), (lstm, LSTM), (fused_by_split, (f(2, 5, 16), f(72, 16), f(16, 24)))],
    ids=["mixture", "lstm", "fused"],
)
def test_the_order_of_the_graph_does_not_matter(model: Callable[..., object], tensors: tuple[Tensor, ...]) -> None:
    graph = trace(model, *tensors)
    factors = factorize(graph)
    expected = partition_of(graph, factors, {node: node for node in graph.nodes})
    for seed in range(12):
        other, where = shuffled(graph, seed)
        found = factorize(other)
        assert partition_of(other, found, where) == expected
        reasons = [sorted(reason.partition(":")[2] for reason in either.dropped) for either in (found, factors)]
        assert reasons[0] == reasons[1]
        for node, instance in factors.instances.items():
            assert found.instances[where[node]].whole == instance.whole
