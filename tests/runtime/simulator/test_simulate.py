"""The simulator: what each collective gives, who waits for whom for ever, and NaN where nothing is promised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from meshc.errors import DeadlockError
from meshc.ir import Record, set_record, spmd
from meshc.ir.mesh import Mesh
from meshc.ir.sharding import Part, Sharding
from meshc.program.program import Stage
from meshc.runtime.simulator.simulate import Meeting, RankProgram, fill_padding, lock_step, run_stage


def run(mesh: Mesh, build: Any, inputs: list[list[Tensor]], **options: Any) -> list[Tensor]:
    """The single result, per rank, of the graph that `build(graph, *placeholders)` makes."""
    graph = Graph()
    placeholders = [graph.placeholder(f"x{index}") for index in range(len(inputs[0]))]
    graph.output((build(graph, *placeholders),))
    results = run_stage(Stage("main", graph, (), ()), inputs, mesh, {axis.name: axis.size for axis in mesh.axes}, **options)
    return [row[0] for row in results]


def call(graph: Graph, target: Any, *args: Any) -> Node:
    return graph.call_function(target, args)


def rows(*values: list[float]) -> list[list[Tensor]]:
    return [[torch.tensor(value)] for value in values]


def lists(found: list[Tensor]) -> list[Any]:
    return [tensor.tolist() for tensor in found]


def test_all_reduce() -> None:
    inputs = rows([1.0, 5.0], [2.0, 3.0])
    for reduction, expected in (("sum", [3.0, 8.0]), ("max", [2.0, 5.0]), ("min", [1.0, 3.0])):
        found = run(Mesh("a=2"), lambda graph, x, how=reduction: call(graph, spmd.all_reduce, x, ["a"], how), inputs)
        assert lists(found) == [expected] * 2


def test_all_gather() -> None:
    found = run(Mesh("a=2"), lambda graph, x: call(graph, spmd.all_gather, x, ["a"], 0), rows([1.0], [2.0]))
    assert lists(found) == [[1.0, 2.0]] * 2


def test_reduce_scatter() -> None:
    found = run(Mesh("a=2"), lambda graph, x: call(graph, spmd.reduce_scatter, x, ["a"], 0, "sum"), rows([1.0, 2.0], [10.0, 20.0]))
    assert lists(found) == [[11.0], [22.0]]


def test_all_to_all() -> None:
    inputs = [[torch.tensor([[1, 2], [3, 4]])], [torch.tensor([[5, 6], [7, 8]])]]
    found = run(Mesh("a=2"), lambda graph, x: call(graph, spmd.all_to_all, x, ["a"], 0, 1), inputs)
    assert lists(found) == [[[1, 2, 5, 6]], [[3, 4, 7, 8]]]


def test_ring_shift() -> None:
    """From the rank two places before, of three: the one behind."""
    found = run(Mesh("a=3"), lambda graph, x: call(graph, spmd.ring_shift, x, ["a"], 2), rows([1.0], [2.0], [3.0]))
    assert lists(found) == [[2.0], [3.0], [1.0]]


def test_orders() -> None:
    """The second half of each is exchanged for that of the one as far from the end; the earlier half is the first, also of odd tiles."""
    tiles = rows([0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0])
    found = run(Mesh("a=3"), lambda graph, x: call(graph, spmd.to_zigzag, x, ["a"], 0), tiles)
    assert lists(found) == [[0.0, 1.0, 8.0], [3.0, 4.0, 5.0], [2.0, 6.0, 7.0]]
    again = run(Mesh("a=3"), lambda graph, x: call(graph, spmd.from_zigzag, x, ["a"], 0), [[tile] for tile in found])
    assert lists(again) == lists([tile for (tile,) in tiles])


def test_halo() -> None:
    """Seven elements in tiles of four; windows of five, two on from each of two outputs: elements -1 to 3 and 3 to 7."""
    inputs = rows([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 99.0])
    window = [4, 2, -1, 5]
    found = run(Mesh("a=2"), lambda graph, x: call(graph, spmd.halo, x, ["a"], 0, 7, window, 0.5), inputs)
    assert lists(found) == [[0.5, 1.0, 2.0, 3.0, 4.0], [4.0, 5.0, 6.0, 7.0, 0.5]]


def test_halo_of_tiles_of_tiles() -> None:
    """Five elements over 2 x 2 are tiles of 2, 1, 2, 0: what is padding in one is what its neighbour holds."""
    inputs = rows([1.0, 2.0], [3.0, 99.0], [4.0, 5.0], [99.0, 99.0])
    found = run(Mesh("a=2,b=2"), lambda graph, x: call(graph, spmd.halo, x, ["a", "b"], 0, 5, [5, 1, 0, 2], 0.0), inputs)
    assert lists(found) == [[1.0, 2.0], [3.0, 4.0], [4.0, 5.0], [0.0, 0.0]]


def test_halo_sum() -> None:
    inputs = rows([9.0, 1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0, 9.0])
    found = run(Mesh("a=2"), lambda graph, x: call(graph, spmd.halo_sum, x, ["a"], 0, 7, [4, 2, -1, 5]), inputs)
    assert lists(found) == [[1.0, 2.0, 3.0, 14.0], [20.0, 30.0, 40.0, 0.0]]


def test_groups_are_the_ranks_that_differ_along_the_axes() -> None:
    inputs = rows([0.0], [1.0], [2.0], [3.0])
    mesh = Mesh("a=2,b=2")
    for axes, expected in ((["a"], [[0, 2], [1, 3], [0, 2], [1, 3]]), (["b"], [[0, 1], [0, 1], [2, 3], [2, 3]])):
        assert lists(run(mesh, lambda graph, x, over=axes: call(graph, spmd.all_gather, x, over, 0), inputs)) == expected


def test_tiles_are_in_the_order_of_the_axes_given() -> None:
    inputs = rows([0.0], [1.0], [2.0], [3.0])
    for axes, expected in ((["a", "b"], [0, 1, 2, 3]), (["b", "a"], [0, 2, 1, 3])):
        found = run(Mesh("a=2,b=2"), lambda graph, x, over=axes: call(graph, spmd.all_gather, x, over, 0), inputs)
        assert lists(found) == [expected] * 4


def test_coordinates_are_all_that_differs() -> None:
    def build(graph: Graph, x: Node) -> Node:
        index = call(graph, spmd.coordinate, "b")
        return call(graph, spmd.shard, x, 0, 3, index)

    whole = [torch.tensor([1.0, 2.0, 3.0, 4.0])]
    found = run(Mesh("a=2,b=3"), build, [whole] * 6)
    assert lists(found) == [[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]] * 2


def test_the_microbatch_is_a_coordinate() -> None:
    def build(graph: Graph, x: Node) -> Node:
        return call(graph, spmd.keep_first, x, call(graph, spmd.coordinate, "mb"))

    for microbatch, expected in ((0, [[1.0], [2.0]]), (1, [[0.0], [0.0]])):
        assert lists(run(Mesh("a=2"), build, rows([1.0], [2.0]), microbatch=microbatch)) == expected


def test_results_do_not_share_memory() -> None:
    """A rank that works in place must not change its neighbours' copies."""
    found = run(Mesh("a=2"), lambda graph, x: call(graph, spmd.all_reduce, x, ["a"], "sum"), rows([1.0], [2.0]))
    found[0].fill_(0.0)
    assert lists(found) == [[0.0], [3.0]]


# --------------------------------------------------------------------------------------------------------------- ranks out of step


def meets(*meetings: tuple[str, str, Tensor]) -> RankProgram:
    """A rank that goes from one collective to the next: (name, axes, tensor)."""
    graph = Graph()
    for number, (name, axes, tensor) in enumerate(meetings):
        node = graph.call_function(spmd.all_reduce, (graph.placeholder(f"x{number}"), list(axes), "sum"), name=name)
        yield Meeting(node, "all_reduce", tuple(axes), tensor, ("sum",))
    return []


ONE = torch.ones(1)


def test_a_rank_that_leaves_early_is_named() -> None:
    with pytest.raises(DeadlockError) as error:
        lock_step([meets(("loss", "a", ONE)), meets()], Mesh("a=2"))
    assert str(error.value) == (
        "ranks wait for each other for ever:\n"
        "  rank 0 waits in all_reduce(x0, ['a'], 'sum') of shape [1] at loss for ranks [1]\n"
        "  rank 1 has finished"
    )


def test_ranks_that_wait_for_each_other_on_two_axes() -> None:
    """Each waits for a neighbour that waits for another one."""
    first, second = meets(("over_a", "a", ONE), ("over_b", "b", ONE)), meets(("over_b", "b", ONE), ("over_a", "a", ONE))
    third, fourth = meets(("over_b", "b", ONE), ("over_a", "a", ONE)), meets(("over_a", "a", ONE), ("over_b", "b", ONE))
    with pytest.raises(DeadlockError, match="for ever") as error:
        lock_step([first, second, third, fourth], Mesh("a=2,b=2"))
    assert str(error.value).count("waits in") == 4


def test_independent_groups_may_be_in_any_order() -> None:
    programs = [meets(("over_a", "a", ONE)), meets(("over_a", "a", ONE)), meets(("over_a", "a", ONE)), meets(("over_a", "a", ONE))]
    assert lock_step(programs, Mesh("a=2,b=2")) == [[]] * 4


@pytest.mark.parametrize("other", [torch.ones(2), torch.ones(1, dtype=torch.float64)], ids=["shape", "dtype"])
def test_operands_that_do_not_match(other: Tensor) -> None:
    with pytest.raises(DeadlockError, match=r"collectives do not match: rank 0 is in all_reduce.* of shape \[1\] at loss, rank 1"):
        lock_step([meets(("loss", "a", ONE)), meets(("loss", "a", other))], Mesh("a=2"))


def test_kinds_that_do_not_match() -> None:
    node = Graph().call_function(spmd.all_gather, (Graph().placeholder("x"), ["a"], 0))

    def gathers() -> RankProgram:
        yield Meeting(node, "all_gather", ("a",), ONE, (0,))
        return []

    with pytest.raises(DeadlockError, match="collectives do not match"):
        lock_step([meets(("loss", "a", ONE)), gathers()], Mesh("a=2"))


# ------------------------------------------------------------------------------------------------------------------------- padding


def test_padding_is_poisoned() -> None:
    sharding = Sharding(((Part("batch", 3, ("a",)),), (Part("hidden", 2),)))
    sizes, x = {"a": 2}, torch.ones(2, 2)
    assert fill_padding(x, sharding, {"a": 0}, sizes).isnan().sum() == 0
    assert fill_padding(x, sharding, {"a": 1}, sizes).isnan().tolist() == [[False, False], [True, True]]


def test_padding_of_a_minor_factor_is_poisoned() -> None:
    sharding = Sharding(((Part("qkv", 2), Part("head", 3, ("a",))),))
    found = fill_padding(torch.ones(4), sharding, {"a": 1}, {"a": 2})
    assert found.isnan().tolist() == [False, True, False, True]


def test_padding_that_is_promised_to_be_zero_is_left_alone() -> None:
    sharding = Sharding(((Part("batch", 3, ("a",)),),), zero=frozenset({(0, 0)}))
    x = torch.ones(2)
    assert fill_padding(x, sharding, {"a": 1}, {"a": 2}) is x


def test_a_missing_mask_shows() -> None:
    """The sum of a padded shard with nothing masked is NaN on simulated ranks; with the mask it is the sum."""
    sharding = Sharding(((Part("batch", 3, ("a",)),),))

    def total(masked: bool) -> Any:
        def build(graph: Graph, x: Node) -> Node:
            set_record(x, Record((2,), torch.float32, sharding))
            if masked:
                count = call(graph, spmd.tile_count, 3, [2], [call(graph, spmd.coordinate, "a")])
                x = call(graph, spmd.mask, x, 0, count, 0.0)
            return call(graph, spmd.all_reduce, call(graph, torch.ops.aten.sum.default, x), ["a"], "sum")

        return build

    inputs = rows([1.0, 2.0], [3.0, 100.0])
    assert lists(run(Mesh("a=2"), total(masked=True), inputs)) == [6.0, 6.0]
    assert run(Mesh("a=2"), total(masked=False), inputs)[0].isnan()
    assert lists(run(Mesh("a=2"), total(masked=False), inputs, poison=False)) == [106.0, 106.0]


def test_observers_see_every_rank_at_once() -> None:
    seen: list[tuple[str, list[float]]] = []
    run(
        Mesh("a=2"),
        lambda graph, x: call(graph, spmd.all_reduce, call(graph, torch.ops.aten.neg.default, x), ["a"], "sum"),
        rows([1.0], [2.0]),
        observe=lambda node, values: seen.append((node.name, [value.item() for value in values])),
    )
    assert seen == [("x0", [1.0, 2.0]), ("neg_default", [-1.0, -2.0]), ("all_reduce", [-3.0, -3.0])]
