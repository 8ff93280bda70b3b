"""What makes a plan dear or cheap, where a simple model of it would be wrong."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from torch import Tensor, nn

from meshc.cost.devices import device
from meshc.cost.links import fastest, link_of
from meshc.ir import op_name
from meshc.ir.mesh import Mesh
from meshc.passes.place.factorize import factorize
from meshc.passes.planner import fold
from meshc.passes.planner.build_space import build_space, searched_axes
from meshc.passes.planner.cost_model import build_model
from meshc.passes.planner.decision_options import OptionRules
from meshc.passes.planner.memory_model import MemoryModel
from meshc.passes.planner.plan_search import PlanSearch
from meshc.passes.planner.reshard_prices import ReshardPrices
from meshc.passes.planner.search_space import Option
from meshc.passes.planner.tile_prices import OperatorPrices
from tests.graphs import trace
from tests.passes.depth.stacks import WORDS, Stack, cross_entropy
from tests.passes.planner.known import step, two

H100 = device("h100")
SIZES = {"dp": 8, "tp": 8}
MOVES = ReshardPrices(Mesh("dp=8,tp=8"), SIZES, H100)
SUMS = (("dp", "sum"), ("tp", "sum"))
GIGABYTE = float(1 << 30)


def kinds(source: object, target: object) -> list[tuple[str, tuple[str, ...]]]:
    (slots, before), (wanted, after) = source, target  # type: ignore[misc]
    moved = tuple((a, b) for a, b in zip(slots, wanted, strict=True) if a or b)
    return [(kind, axes) for kind, axes, _ in MOVES.messages(moved, before, after)]


def test_what_two_axes_store_in_one_dim_takes_one_collective() -> None:
    """`vocab/tp/dp` where the product is split by tp, `vocab/dp/tp` where the gradient is partial over both."""
    split, both = ((("tp",), ()), (("dp", "sum"),)), (((), ()), SUMS)
    assert kinds(split, ((("tp", "dp"), ()), ())) == [("reduce_scatter", ("dp",))]
    assert kinds(both, ((("dp", "tp"), ()), ())) == [("reduce_scatter", ("dp", "tp"))]
    assert kinds(((("tp", "dp"), ()), ()), ((("tp",), ()), ())) == [("all_gather", ("dp",))]
    assert kinds(((("dp", "tp"), ()), ()), (((), ()), ())) == [("all_gather", ("dp", "tp"))]
    one_dim, two_dims = ((("dp", "tp"), ()), ()), ((("dp",), ("tp",)), ())
    assert MOVES.seconds(both, one_dim, GIGABYTE) < MOVES.seconds(both, two_dims, GIGABYTE)  # tp then reduces what dp has left


def test_storage_may_lie_in_one_dim_by_both_axes_in_either_order() -> None:
    legal = ("dp", (None, 0, 1)), ("tp", (None, 0, 1))
    possible = OptionRules((4096, 4096), legal, (), (), tuple(SIZES.items()), ordered=False)
    stored = {one.axes for one in possible.options()}
    assert {(("dp", "tp"), ()), (("tp", "dp"), ()), (("dp",), ("tp",))} <= stored
    computed = {one.axes for one in replace(possible, ordered=True).options()}
    assert (("tp", "dp"), ()) not in computed


def test_a_gather_is_priced_by_its_link() -> None:
    size = 64 * GIGABYTE
    for axes in (("dp",), ("tp",), ("dp", "tp")):
        link = link_of(MOVES.mesh, axes, H100)
        ring = fastest("all_gather", prod(SIZES[axis] for axis in axes), size, link).seconds(link) + H100.collective_s
        assert MOVES.seconds(((axes,), ()), (((),), ()), size) == pytest.approx(ring)


def test_a_split_log_softmax_is_priced_as_it_will_be_written() -> None:
    """Its rows' maximum and sum go over the axis: on a device without latencies that is all that a small split costs in messages."""
    graph = trace(lambda x: torch.log_softmax(x, 1), torch.randn(512, 1024))
    factors = factorize(graph)
    (node,) = [node for node in graph.nodes if op_name(node) == "aten._log_softmax"]
    instance = factors.instances[node]
    tokens = tuple(instance.size)
    operators = OperatorPrices(factors, Mesh("tp=8"), {"tp": 8}, H100)
    labels: dict[object, int] = {token: at for at, token in enumerate(tokens)}
    by_rows, by_columns = operators.seconds(
        node, labels, [Option(tuple(("tp",) if token == taken else () for token in tokens)) for taken in tokens]
    )
    assert by_columns > by_rows + 2 * H100.collective_s


def test_equal_calls_are_written_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal ones of three, on other values: what they cost is the same, and so is what it takes to say so."""
    softmax = torch.log_softmax
    graph = trace(lambda x, y: (softmax(x, 1), softmax(x.exp(), 1), softmax(y, 1)), torch.randn(512, 1024), torch.randn(512, 2048))
    nodes = [node for node in graph.nodes if op_name(node) == "aten._log_softmax"]
    factors, written = factorize(graph), []
    lower = OperatorPrices._lower
    monkeypatch.setattr(OperatorPrices, "_lower", lambda self, *given: written.append(given) or lower(self, *given))
    operators, found = OperatorPrices(factors, Mesh("tp=8"), {"tp": 8}, H100), []
    for node in nodes:
        tokens = tuple(factors.instances[node].size)
        some = [Option(tuple(("tp",) if token == taken else () for token in tokens)) for taken in tokens]
        found.append(operators.seconds(node, {token: at for at, token in enumerate(tokens)}, some).tolist())
    assert len(nodes) == 3 and len(found[0]) == 2 and len(written) == 4
    assert found[0] == found[1] and all(one < other for one, other in zip(found[0], found[2], strict=True))


@pytest.mark.parametrize("bias", [(512,), (256, 512), (256, 1)])
def test_a_product_with_a_bias_is_priced_as_it_will_be_written(bias: tuple[int, ...]) -> None:
    """Under every option: where the sum is split, each rank but the first adds zeros, which are made."""
    graph = trace(torch.addmm, torch.randn(bias), torch.randn(256, 1024), torch.randn(1024, 512))
    (node,) = [node for node in graph.nodes if op_name(node) == "aten.addmm"]
    factors = factorize(graph)
    instance = factors.instances[node]
    operators = OperatorPrices(factors, Mesh("dp=8,tp=8"), SIZES, H100)
    labels: dict[object, int] = {token: at for at, token in enumerate(instance.size)}
    legal = tuple((axis, (None, *labels.values())) for axis in SIZES)
    every = OptionRules(tuple(instance.size.values()), legal, (), (), tuple(SIZES.items())).options()
    written = [operators._lower(instance, {token: one.axes[labels[token]] for token in instance.size}) for one in every]
    assert len(every) == 16
    assert operators.seconds(node, labels, every).tolist() == pytest.approx(written, rel=1e-12)


@pytest.mark.broad
def test_equal_layers_are_decided_once_whatever_their_number() -> None:
    """The classes of a deep stack are those of one that has a first layer, some inner ones and a last."""
    counts = {}
    for layers in (6, 8):
        model = Stack([16] * layers)
        ids = torch.zeros(WORDS + 1, 4, dtype=torch.int64)
        placed = step(model, {"ids": ids, "target": ids}, "dp=2,tp=2", "dp: auto\ntp: auto", cross_entropy)
        space = build_space(placed, searched_axes(placed), None)
        members = fold.fold(space).members
        assert sorted(id(key) for row in members for key in row) == sorted(map(id, space.decisions))
        assert all(space.decisions[key].options == space.decisions[row[0]].options for row in members for key in row)
        counts[layers] = len(members), len(space.decisions)
    assert counts[6][0] == counts[8][0] < counts[6][1] < counts[8][1]


class Cast(nn.Module):
    """Between its two products a cast to four bytes and back."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).float().relu().to(torch.bfloat16)).square().sum()


def test_casts_and_copies_on_the_way_cost_what_they_move() -> None:
    """Of the product that is cast: its two bytes an entry are read, and four are written, of the part that a rank has."""
    with torch.device("meta"):
        model, x = Cast().to(torch.bfloat16), torch.empty(1 << 16, 256, dtype=torch.bfloat16)
    search = PlanSearch(step(model, {"x": x}, "dp=8", "dp: auto", lambda out: out), H100)
    found = 0
    for group in search.model.groups:
        value = group.values[0]
        made = search.model.decision(group.maker)
        if value.phase != "forward" or value.sizes != (1 << 16, 1024) or not any(reading.through for reading in value.readings):
            continue
        found += 1
        for option, own in zip(made.options, search.model.own[group.maker], strict=True):
            ranks = prod(SIZES[axis] for axes in option.axes[:1] for axis in axes)
            alone = float(search.model.operators.seconds(made.key, {t: at for at, t in enumerate(made.labels)}, [option])[0])
            narrow, wide = (2, 4) if value.itemsize == 2 else (4, 2)
            if not option.deferred and sum(map(len, option.axes[1:])) == 0:
                assert own - alone == pytest.approx((narrow + wide) * value.elements / ranks / H100.bytes_per_s + H100.launch_s)
    assert found


def test_memory_counts_what_an_operator_works_on() -> None:
    """Whole on every rank: weights and two moments of each in bfloat16, and at the fullest moment no less than the largest operands."""
    rows, hidden, ffn = 1 << 16, 256, 1024
    placed = two(rows, hidden, ffn, "dp=2,tp=2", "dp: auto\ntp: auto")
    space = build_space(placed, searched_axes(placed), None)
    folded = fold.fold(space)
    operators, moves = OperatorPrices(placed.factors, placed.mesh, space.sizes, H100), ReshardPrices(placed.mesh, space.sizes, H100)
    model = build_model(space, folded, operators, moves)
    memory = MemoryModel(model, placed)
    idle = tuple(
        next(at for at, one in enumerate(model.decision(number).options) if not any(one.axes) and not one.deferred)
        for number in range(len(model.own))
    )
    walked = memory.walk(idle)
    weights, activation = 2 * hidden * ffn * 2, rows * ffn * 2
    assert walked.min() >= 3 * weights + rows * hidden * 2
    assert walked.max() >= walked.min() + 2 * activation  # h, and its gradient
    split = tuple(max(range(len(own)), key=lambda at: len(model.decision(n).options[at].axes)) for n, own in enumerate(model.own))
    assert memory.walk(split).max() <= walked.max()
