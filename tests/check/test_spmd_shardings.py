"""What moves between ranks, a line at a time: tiles in the order in which they lie, of what ranks have alike or in part, at a rank's own place."""

# ruff: noqa: E501 - a line a case
from __future__ import annotations

import pytest

from meshc import rules
from meshc.check import check_program, sharding_walk
from meshc.errors import ArtifactError
from meshc.text.parse import parse_stage
from tests.check.test_attacks import program

SIZES = {"dp": 2, "tp": 2, "mb": 2}
TEXT = """@ranks("dp=2,tp=2,mb=2")
def main(
    x: "f32[batch 8/dp/tp, width 8]" = "input:x",
    w: "f32[batch 8, width 8]" = "input:w",
    o: "f32[batch 7/dp/tp, width 8]" = "input:o",
    s: "f32[batch 8, width 8] partial(sum: dp)" = "input:s",
    t: "f32[batch 8, width 8] partial(sum: dp, sum: tp)" = "input:t",
    q: "f32[two 2 * width 4/tp, batch 8/dp]" = "input:q",
    i: "i64[batch 8/dp]" = "input:i",
    seed: "i64[2]" = "random:seed_step",
    qs: "f32[batch 4, heads 2, seq 8/dp, head 4]" = "input:qs",
    ks: "f32[batch 4, heads 2, seq 8, head 4]" = "input:ks",
    both: "f32[batch 8/dp, heads 4/tp, seq 8, head 4]" = "input:both",
):
    c: "int" = coordinate("dp")
    d: "int" = coordinate("tp")
    m: "int" = coordinate("mb")
    n: "int" = tile_start(4, [2, 2], [c, d])
    r: "int" = ring_place(c, 1, 2)
    first: "int" = tile_start(8, [2], [c])
    other: "int" = tile_start(8, [2], [d])
    before: "int" = tile_start(8, [2], [r])
    small: "int" = tile_start(4, [2], [c])
    four: "i64[4]" = aten.arange(4)
    LINES
    return {
        "output:x": x,
    }
"""


def told(*lines: str) -> list[tuple[str, str]]:
    return list(sharding_walk.faults(parse_stage(TEXT.replace("LINES", "\n    ".join(lines))), SIZES, rules))


SOUND = [
    ('y: "f32[batch 8, width 8]" = all_gather(x, ["dp", "tp"], 0)',),
    ('y: "f32[batch 8/dp, width 8]" = all_gather(x, ["tp"], 0)',),
    ('y: "f32[batch 8/dp/tp, width 8]" = reduce_scatter(t, ["dp", "tp"], 0, "sum")',),
    ('y: "f32[batch 8/tp/dp, width 8]" = reduce_scatter(t, ["tp", "dp"], 0, "sum")',),
    ('y: "f32[batch 8/dp/tp, width 8] pad(zero: 0.0)" = shard(w, 0, 4, n)',),
    ('y: "f32[batch 8/dp, width 8]" = shard(w, 0, 2, c)', 'z: "f32[batch 8/dp/tp, width 8]" = shard(y, 0, 2, d)'),
    ('y: "f32[batch 8/dp/mb, width 8]" = shard(p, 0, 2, m)',),
    ('y: "f32[batch 4/dp, width 8]" = shard(p, 0, 2, m)',),  # rows of a microbatch, whose sizes these are
    ('y: "f32[batch 8, width 8] partial(sum: dp, sum: tp)" = keep_first(w, n)',),
    ('y: "f32[batch 8, width 8] partial(sum: dp)" = aten.full([8, 8], 0)', 'z: "f32[batch 8, width 8]" = all_reduce(y, ["dp"], "sum")'),
    ('y: "f32[batch 8, width 8] partial(sum: dp)" = aten.full([8, 8], fill_value=0)',),
    ('y: "f32[batch 8, width 8]" = broadcast(w, ["dp"], 1)',),
    ('y: "i64[batch 8/dp]" = aten.add.Tensor(four, first)', 'z: "i64[rows 4]" = aten.add.Tensor(four, 1)'),
    ('y: "(f32[4, 2, 4, 4], f32[4, 2, 4])" = meshc.attention(qs, ks, ks, None, True, 0.5, 0, 0, first)',),
    ('y: "(f32[4, 2, 4, 4], f32[4, 2, 4])" = meshc.attention(qs, ks, ks, None, False, 0.5)',),
    ('heads: "int" = tile_start(4, [2], [d])', 'y: "(f32[4, 2, 8, 4], f32[4, 2, 8])" = meshc.attention(both, both, both, None, True, 0.5, 0, 0, 0, 0, None, seed, 1, 0.1, [8, 4, 8, 8], [4, 2, 8, 8], [first, heads, 0, 0])'),
    ('u: "f32[4, 8]" = meshc.uniform(seed, 3, [8, 8], [4, 8], [first, 0], f32)', 'y: "f32[batch 8/dp, width 8]" = aten.reshape(u, [4, 8])'),
    ('y: "f32[batch 8/dp/tp, width 8]" = broadcast(x, ["mb"], 1)',),
    ('y: "f32[4, 8]" = shard(w, 0, 2, 1)', 'z: "f32[4, 8]" = aten.relu(y)'),
    # several values that travel together, whose types say again how they lie when they have come
    ('a: "f32[1, 16]" = aten.reshape(x, [1, 16])', 'b: "f32[1, 16]" = aten.reshape(x, [1, 16])', 'f: "f32[1, 32]" = aten.cat([a, b], 1)',
     'g: "f32[4, 32]" = all_gather(f, ["dp", "tp"], 0)', 'h: "f32[4, 16]" = aten.slice.Tensor(g, 1, 0, 16)',
     'y: "f32[batch 8, width 8]" = aten.reshape(h, [8, 8])'),
]  # fmt: skip


@pytest.mark.parametrize("lines", SOUND)
def test_sound_lines_are_let_through(lines: tuple[str, ...]) -> None:
    given = 'p: "f32[batch 8/dp, width 8]" = all_gather(x, ["tp"], 0)'
    assert told(given, *lines) == []


WRONG = [
    # the order of axes
    ('y: "f32[batch 8, width 8]" = all_gather(x, ["tp", "dp"], 0)', "it gathers over tp, dp, in this order, along dim 0, which is [batch 8/dp/tp]: its tiles lie otherwise"),
    ('y: "f32[batch 8/tp, width 8]" = all_gather(x, ["dp"], 0)', "it gathers over dp, in this order, along dim 0, which is [batch 8/dp/tp]: its tiles lie otherwise"),
    ('y: "f32[batch 8/dp/tp, width 8]" = reduce_scatter(t, ["tp", "dp"], 0, "sum")', "which split over tp, dp is not [batch 8/dp/tp]"),
    ('y: "f32[batch 8/tp/dp, width 8] pad(zero: 0.0)" = shard(w, 0, 4, n)', "which split over dp, tp is not [batch 8/tp/dp]"),
    ('y: "f32[8, 8]" = all_gather(o, ["tp", "dp"], 0)', "it gathers over tp, dp, in this order, along dim 0, which is [batch 7/dp/tp]"),
    # a tile of what is not the first of a dim
    ('y: "f32[two 2 * width 4, batch 8/dp]" = all_gather(q, ["tp"], 0)', "it gathers over tp along dim 0, which is [two 2 * width 4/tp]: a rank has its tile of width more than once there"),
    ('y: "f32[batch 8/dp * width 2/tp, two 4]" = reduce_scatter(v, ["tp"], 0, "sum")', "which split over tp is not [batch 8/dp * width 2/tp]"),
    # numbers that are no rank's
    ('y: "f32[batch 8/dp, width 8]" = shard(w, 0, 2, 1)', "its operator makes dim 0 [4], declared is [batch 8/dp]"),
    ('y: "f32[batch 8/dp/mb, width 8]" = shard(p, 0, 2, 1)', "it cuts positions 2 to 4 out of [batch 8/dp]"),
    ('y: "f32[batch 8/dp, width 8]" = shard(w, 0, 2, m)', "its operand's dim 0 is [batch 8], of which a microbatch is not [batch 8/dp]"),
    ('y: "f32[batch 8/dp, width 8]" = shard(w, 0, 2, r)', "r is not a rank's number among 2, by which it takes its tile"),
    ('y: "f32[batch 8/dp, width 8] partial(sum: tp)" = keep_first(p, r)', "it keeps what the first rank has, and r is no rank's number"),
    ('y: "f32[batch 8/dp, width 8]" = keep_first(p, 1)', "it keeps what the first rank has, and 1 is no rank's number"),
    ('y: "f32[batch 8/dp, width 8] partial(sum: tp)" = keep_first(p, 0)', "its operator makes it partial over nothing, declared is partial(sum: tp)"),
    ('y: "f32[batch 8, width 8] partial(sum: dp)" = aten.full([8, 8], 1)', "its operator makes it partial over nothing, declared is partial(sum: dp)"),
    ('y: "f32[batch 8, width 8] partial(max: dp)" = aten.full([8, 8], 0)', "its operator makes it partial over nothing, declared is partial(max: dp)"),
    # positions, and what is drawn for them: from the start of the tile on
    ('y: "i64[batch 8/dp]" = aten.arange(4)', "its operator makes dim 0 [4], declared is [batch 8/dp]"),
    ('y: "i64[1, batch 8/dp]" = aten.reshape(four, [1, 4])', "it is a view of [4], whose elements do not lie as [1, batch 8/dp] says"),
    ('y: "i64[batch 8/dp]" = aten.add.Tensor(four, 4)', "its operator makes dim 0 [4], declared is [batch 8/dp]"),
    ('y: "i64[batch 8/dp]" = aten.add.Tensor(four, other)', "its operator makes dim 0 [8/tp], declared is [batch 8/dp]"),
    ('y: "i64[batch 8/dp]" = aten.add.Tensor(four, n)', "it counts 4 positions from n on, which is not where a rank's tile of so many starts"),
    ('y: "i64[batch 8/dp]" = aten.add.Tensor(four, before)', "it counts 4 positions from before on, which is not where a rank's tile of so many starts"),
    ('y: "f32[batch 8/dp, width 8]" = meshc.uniform(seed, 3, [8, 8], [4, 8], [0, 0], f32)', "0 is not where a rank's 4 of 8 positions start"),
    ('y: "f32[batch 8/dp, width 8]" = meshc.uniform(seed, 3, [8, 8], [4, 8], [before, 0], f32)', "before is not where a rank's 4 of 8 positions start"),
    ('y: "f32[batch 8/dp, width 8]" = meshc.uniform(seed, 3, [16, 8], [4, 8], [first, 0], f32)', "first is the start of a tile of 8 positions over dp, and 4 of 16 are drawn"),
    ('y: "f32[batch 8/dp, width 8]" = meshc.uniform(seed, 3, [8, 8], [4, 8], [other, 0], f32)', "it draws a tile over tp, and what is drawn for is [batch 8/dp, width 8]"),
    ('y: "(f32[4, 2, 8, 4], f32[4, 2, 8])" = meshc.attention(both, both, both, None, True, 0.5, 0, 0, 0, 0, None, seed, 1, 0.1, [8, 4, 8, 8], [4, 2, 8, 8], [other, small, 0, 0])', "it draws a tile over tp, dp, and what is drawn for is [batch 8/dp, heads 4/tp, seq 8, seq 8]"),
    # a causal mask goes from the start of the queries' tile on
    ('y: "(f32[4, 2, 4, 4], f32[4, 2, 4])" = meshc.attention(qs, ks, ks, None, True, 0.5)', "qs is [seq 8/dp] along dim 2, and its causal mask starts at 0 on all ranks"),
    ('y: "(f32[4, 2, 4, 4], f32[4, 2, 4])" = meshc.attention(qs, ks, ks, None, True, 0.5, 0, 0, before)', "its start is of the rank 1 before this one along dp, and not of this rank"),
    ('y: "(f32[4, 2, 4, 4], f32[4, 2, 4])" = meshc.attention(qs, ks, ks, None, True, 0.5, 0, 0, small)', "its start is a number of tiles of 4 positions of 1, and qs has 4 on a rank"),
    # what ranks have tiles or parts of
    ('y: "f32[batch 8/dp/tp, width 8]" = broadcast(x, ["dp"], 0)', "it sends one rank's tile to all of dp, and dp splits its operand"),
    ('y: "f32[batch 8, width 8] partial(sum: dp)" = broadcast(s, ["tp", "dp"], 1)', "it sends one rank's part to all of tp, dp, and its operand is partial(sum: dp)"),
    ('y: "f32[batch 8, width 8] partial(sum: dp)" = keep_first(s, c)', "it keeps what the first rank of dp has, and its operand is another on each of these: the rest is lost"),
    ('y: "f32[batch 8/dp/tp, width 8]" = ring_shift(x, ["dp"], 1)', "it is another rank's tile, which no type says"),
    ('y: "f32[batch 8/dp/tp, width 8]" = all_to_all(x, ["dp"], 0, 0)', "it exchanges tiles along dim 0 alone: what a rank has then no type says"),
    # what is only looked at, copied, or taken out of several
    ('y: "i64[batch 8/tp]" = meshc.check_index(i, 0, 9, None, "i", "")', "its operator makes dim 0 [batch 8/dp], declared is [batch 8/tp]"),
    ('y: "f32[batch 8/tp/dp, width 8]" = aten.clone(x)', "its operator makes dim 0 [batch 8/dp/tp], declared is [batch 8/tp/dp]"),
    ('y: "f32[batch 8/tp/dp, width 8]" = aten.copy(x, x)', "its operator makes dim 0 [batch 8/dp/tp], declared is [batch 8/tp/dp]"),
    ('y: "f32[batch 8/tp/dp, width 8]" = aten.repeat(x, [1, 1])', "its operator makes dim 0 [batch 8/dp/tp], declared is [batch 8/tp/dp]"),
    ('y: "f32[batch 8/tp/dp, width 8]" = aten.alias(x)', "its operator makes dim 0 [batch 8/dp/tp], declared is [batch 8/tp/dp]"),
    ('y: "f32[batch 8/tp/dp, width 8]" = getitem(two, 0)', "its operator makes dim 0 [batch 8/dp/tp], declared is [batch 8/tp/dp]"),
    ('y: "i32[batch 8/tp/dp, width 8]" = aten.view.dtype(x, i32)', "x is split or partial over dp, tp, and aten.view.dtype takes whole values: no rule says what it makes of tiles"),
    ('y: "f32[batch 8/tp/dp, width 8]" = to_host(x)', "its operator makes dim 0 [batch 8/dp/tp], declared is [batch 8/tp/dp]"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "why"), WRONG)
def test_the_line_that_lies_is_named(line: str, why: str) -> None:
    given = 'p: "f32[batch 8/dp, width 8]" = all_gather(x, ["tp"], 0)', 'v: "f32[batch 8/dp * width 2, two 4] partial(sum: tp)" = keep_first(k, d)'
    first = 'k: "f32[batch 8/dp * width 2, two 4]" = aten.reshape(p, [8, 4])'
    two = 'two: "(f32[2, 8], f32[2, 1], f32[2, 1])" = aten.native_layer_norm(x, [8], None, None, 1e-05)'
    ((name, said),) = told(given[0], first, given[1], two, line)
    assert name == "y" and why in said, said


TOGETHER = """
    a: "f32[1, 16]" = aten.reshape(x, [1, 16])
    b: "f32[1, 16]" = aten.reshape(x, [1, 16])
    f: "f32[1, 32]" = aten.cat([a, b], 1)
    g: "f32[4, 32]" = all_gather(f, ["tp", "dp"], 0)
"""
SCATTERED = """
    a: "f32[4, 16]" = aten.reshape(t, [4, 16])
    f: "f32[4, 32]" = aten.cat([a, a], 1)
    g: "f32[1, 32]" = reduce_scatter(f, ["tp", "dp"], 0, "sum")
    h: "f32[1, 16]" = aten.slice.Tensor(g, 1, 16, 32)
    y: "f32[batch 8/dp/tp, width 8]" = aten.reshape(h, [2, 8])
"""


@pytest.mark.parametrize(
    ("text", "value", "why"),
    [
        (TOGETHER, "g", "it gathers over tp, dp, in this order, and its operand is split over dp/tp"),
        (SCATTERED, "y", "its operator makes it split over tp/dp, in this order, declared is a value split over dp/tp"),
    ],
)
def test_values_that_travel_together_lie_in_the_order_of_their_collective(text: str, value: str, why: str) -> None:
    ((name, said),) = told(*(line.strip() for line in text.strip().splitlines()))
    assert name == value and why in said, said


def test_what_is_drawn_may_be_handed_out_as_it_is() -> None:
    typed = TEXT.replace("LINES", 'u: "f32[8, 8]" = meshc.uniform(seed, 3, [8, 8], [8, 8], [0, 0], f32)').replace('"output:x": x', '"output:x": u')
    assert list(sharding_walk.faults(parse_stage(typed), SIZES, rules)) == []


def test_a_check_looks_for_the_rows_of_who_reads_by_it() -> None:
    lines = 'k: "i64[5]" = meshc.check_index(i, 0, HIGH, None, "i", "")', 'y: "f32[rows 5, width 6]" = aten.embedding(e, k)'
    typed = {"i": "i64[rows 5]", "v": "f32[vocab 8, width 6]"}
    flat = [line.replace("(e,", "(v,").replace("i64[5]", "i64[rows 5]") for line in lines]
    check_program(program(*[line.replace("HIGH", "8") for line in flat], result="y", **typed), "program.json", rules)
    with pytest.raises(ArtifactError, match=r"k: it lets 0 to 6 through, and y reads by it, which takes 0 to 7"):
        check_program(program(*[line.replace("HIGH", "7") for line in flat], result="y", **typed), "program.json", rules)
