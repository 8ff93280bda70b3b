"""The least bytes that backward needs kept: against all subsets, on drawn graphs."""

from __future__ import annotations

import random
from itertools import chain, combinations

import pytest
from torch.fx import Graph, Node

from meshc.passes.memory.kept_values import all_kept, cheapest_kept, least_kept


def drawn(seed: int) -> tuple[list[Node], dict[Node, list[Node]], dict[Node, int | None], set[Node]]:
    rng = random.Random(seed)
    graph, values = Graph(), list[Node]()
    operands: dict[Node, list[Node]] = {}
    for _ in range(8):
        read = rng.sample(values, min(len(values), rng.randint(0, 2)))
        node = graph.call_function(print, tuple(read))
        if read and rng.random() < 0.7:
            operands[node] = read
        values.append(node)
    sizes = {node: None if node in operands and rng.random() < 0.2 else rng.randint(1, 9) for node in values}
    return values, operands, sizes, set(rng.sample(values, 3))


def serves(kept: set[Node], operands: dict[Node, list[Node]], wanted: set[Node]) -> bool:
    """Whether all that is wanted is kept or can be made of what is."""
    work = [node for node in wanted if node not in kept]
    while work:
        node = work.pop()
        if node not in operands:
            return False
        work += [operand for operand in operands[node] if operand not in kept]
    return True


@pytest.mark.parametrize("seed", range(40))
def test_no_other_choice_keeps_fewer_bytes(seed: int) -> None:
    values, operands, sizes, wanted = drawn(seed)
    kept = least_kept(values, operands, sizes.__getitem__, wanted)
    can = [node for node in values if sizes[node] is not None]
    assert serves(kept, operands, wanted) and kept <= set(can)
    every = chain.from_iterable(combinations(can, count) for count in range(len(can) + 1))
    best = min(sum(sizes[node] or 0 for node in some) for some in every if serves(set(some), operands, wanted))
    assert sum(sizes[node] or 0 for node in kept) == best


def test_of_equal_bytes_what_is_made_last_is_kept() -> None:
    graph = Graph()
    first = graph.call_function(print)
    second = graph.call_function(print, (first,))
    assert least_kept([first, second], {second: [first]}, lambda node: 4, {second}) == {second}
    assert least_kept([first, second], {second: [first]}, lambda node: 4, set()) == set()


@pytest.mark.parametrize("seed", range(20))
def test_where_keeping_costs_nothing_a_cut_keeps_the_same(seed: int) -> None:
    values, operands, sizes, wanted = drawn(seed)
    free = {node: None if sizes[node] is None else 0.0 for node in values}
    making = {node: random.Random(f"{seed}{turn}").random() for turn, node in enumerate(operands)}
    assert all_kept(operands, sizes.__getitem__, wanted) == cheapest_kept(values, operands, free, making, wanted)
