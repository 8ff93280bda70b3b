"""Order: where copies of a block stand in a sequence."""

from __future__ import annotations

from meshc.passes.depth.order import order_with_copies


def order(items: str, copies: int) -> str:
    """Items are a piece's letter and a block's number, or a letter alone; copies are marked by +."""
    names = items.split()
    blocks = {name: int(name[1:]) for name in names if len(name) > 1}
    partner = {name: f"{name[0]}2" for name in names if name[1:] == "1"}
    return " ".join(f"{name}{f'+{number}' if number else ''}" for name, number in order_with_copies(names, blocks, partner, copies))


def test_copies_stand_behind_block_1_going_up_and_before_it_going_down() -> None:
    assert order("x a0 a1 a2 a3 y b3 b2 b1 b0 z", 2) == "x a0 a1 a1+1 a1+2 a2 a3 y b3 b2 b1+2 b1+1 b1 b0 z"


def test_what_belongs_to_no_block_may_stand_inside_one() -> None:
    assert order("a0 a1 x b1 a2 b2 a3", 1) == "a0 a1 x b1 a1+1 b1+1 a2 b2 a3"


def test_pieces_that_go_up_and_down_may_follow_each_other() -> None:
    assert order("b2 a1 b1 a2", 1) == "b2 a1 a1+1 b1+1 b1 a2"
