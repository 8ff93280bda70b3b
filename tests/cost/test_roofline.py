"""The roofline of single operators, on a device with round figures."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import pytest
import torch

import meshc.ops.attention
import meshc.ops.delta_rule
import meshc.ops.optim  # noqa: F401 - registers the updates
from meshc.cost.flops import flops
from meshc.cost.roofline import moved_bytes, seconds
from meshc.ir import spmd
from tests.cost.building import F32, ROUND, Building

aten = torch.ops.aten
BF16, I64 = torch.bfloat16, torch.int64

def test_a_large_product_is_bound_by_arithmetic() -> None:
    b = Building()
    product = b.call(aten.mm.default, b.given(1000, 2000), b.given(2000, 500), made=(1000, 500))
    assert moved_bytes(product) == 4 * (1000 * 2000 + 2000 * 500 + 1000 * 500)
    # 2 GFLOP at 0.5 TFLOP/s are 4 ms, 14 MB at 1 GB/s are 14
    assert seconds(product, ROUND) == pytest.approx(14e-3 + 1e-6)
    square = b.call(aten.mm.default, b.given(4000, 4000), b.given(4000, 4000), made=(4000, 4000))
    assert seconds(square, ROUND) == pytest.approx(2 * 4000**3 / 0.5e12 + 1e-6)


def test_a_product_moves_while_it_does_not_multiply() -> None:
    """Of products alone: beside 40 us of arithmetic this thin one moves its 4.08 MB, at 10 GB/s, three times over."""
    b, on = Building(), replace(ROUND, memory_Bps=2e10, product_moves=3.0)
    thin = b.call(aten.mm.default, b.given(10, 1000), b.given(1000, 1000), made=(10, 1000))
    moving = 4 * (10 * 1000 + 1000 * 1000 + 10 * 1000) / 1e10
    assert seconds(thin, on) == pytest.approx(2e7 / 0.5e12 + 3 * moving + 1e-6)
    assert seconds(thin, replace(on, product_moves=0.0)) == pytest.approx(moving + 1e-6)
    total = b.call(aten.add.Tensor, b.given(1000, 1000), b.given(1000), made=(1000, 1000))
    assert seconds(total, on) == seconds(total, replace(on, product_moves=0.0))


def test_each_dtype_has_its_rate_and_its_bytes() -> None:
    b = Building()
    times = []
    for dtype in (torch.float64, F32, BF16):
        x = b.given(4000, 4000, dtype=dtype)
        times.append(seconds(b.call(aten.mm.default, x, b.given(4000, 4000, dtype=dtype), made=(4000, 4000), dtype=dtype), ROUND))
    # in bfloat16 the product takes 64 ms, and its 96 MB longer
    assert times == [pytest.approx(one + 1e-6) for one in (128e9 / 0.5e9, 128e9 / 0.5e12, 96e-3)]


def test_a_pointwise_operator_reads_and_writes() -> None:
    b = Building()
    total = b.call(aten.add.Tensor, b.given(1000, 1000), b.given(1000), made=(1000, 1000))
    assert seconds(total, ROUND) == pytest.approx((4e6 + 4e3 + 4e6) / 1e9 + 1e-6)
    square = b.call(aten.mul.Tensor, total, total, made=(1000, 1000))
    assert moved_bytes(square) == 8e6  # one operand, read once


def test_more_takes_longer() -> None:
    b = Building()
    sizes = (1, 10, 100, 1000, 3000)
    times = [seconds(b.call(aten.mm.default, b.given(n, n), b.given(n, n), made=(n, n)), ROUND) for n in sizes]
    assert times == sorted(times) and len(set(times)) == len(sizes) and times[0] == pytest.approx(1e-6, rel=0.1)


def test_what_moves_nothing_takes_nothing() -> None:
    b = Building()
    x = b.given(100, 100)
    view = b.call(aten.view.default, x, [10000], made=(10000,))
    flat = b.call(aten.reshape.default, x, [10000], made=(10000,))
    turned = b.call(aten.t.default, x, made=(100, 100))
    many = b.call(aten.split.Tensor, x, 50, made=[(50, 100), (50, 100)])
    piece = b.call(operator.getitem, many, 0, made=(50, 100))
    place = b.call(spmd.coordinate, "dp", dtype=None)
    tile = b.call(spmd.shard, x, 0, 2, place, made=(50, 100))
    sent = b.call(spmd.all_reduce, x, ["dp"], "sum", made=(100, 100))
    assert [seconds(node, ROUND) for node in (x, view, flat, turned, many, piece, place, tile, sent)] == [0.0] * 9


def test_an_expanded_operand_is_read_once() -> None:
    b = Building()
    wide = b.call(aten.expand.default, b.given(1, 1000), [1000, 1000], made=(1000, 1000))
    assert moved_bytes(b.call(aten.clone.default, wide, made=(1000, 1000))) == 4e3 + 4e6
    part = b.call(aten.slice.Tensor, b.given(1000, 1000), 0, 0, 10, made=(10, 1000))
    assert moved_bytes(b.call(aten.clone.default, part, made=(10, 1000))) == 8e4


def test_an_embedding_reads_the_rows_that_it_makes() -> None:
    b = Building()
    rows = b.call(aten.embedding.default, b.given(50000, 100), b.given(8, dtype=I64), made=(8, 100))
    assert moved_bytes(rows) == 2 * 8 * 100 * 4 + 8 * 8
    taken = b.call(torch.ops.meshc.take.default, b.given(8, 50000), b.given(8, dtype=I64), -100, made=(8,))
    assert moved_bytes(taken) == 8 * 4 + 8 * 4 + 8 * 8
    empty = b.call(aten.empty.memory_format, [1000, 1000], made=(1000, 1000))
    assert moved_bytes(empty) == 0


def test_attention_moves_no_scores() -> None:
    b = Building()
    q, k, v = (b.given(2, 4, 1024, 64) for _ in range(3))
    made = [(2, 4, 1024, 64), (2, 4, 1024)]
    full = b.call(torch.ops.meshc.attention.default, q, k, v, None, False, 0.125, made=made)
    assert moved_bytes(full) == 4 * (4 * 2 * 4 * 1024 * 64 + 2 * 4 * 1024)
    flops = 4 * 2 * 4 * 1024 * 1024 * 64
    fast_memory = replace(ROUND, memory_Bps=1e18, launch_s=0.0)  # a quarter of 1 TFLOP/s for attention
    assert seconds(full, fast_memory) == pytest.approx(flops / 0.25e12)
    causal = b.call(torch.ops.meshc.attention.default, q, k, v, None, True, 0.125, made=made)
    share = (1024 + 128) / 2 / 1024  # the diagonal goes through blocks of 128 keys
    assert seconds(causal, fast_memory) == pytest.approx(flops * share / 0.25e12)
    wide = replace(fast_memory, attention_keys=4096)
    assert seconds(causal, wide) == seconds(full, wide)
    # 256 queries of the last of four ranks see all 768 keys before them, and of their own a triangle
    tile, start = b.given(2, 4, 256, 64), b.call(spmd.coordinate, "cp", dtype=None)
    part = b.call(torch.ops.meshc.attention.default, tile, k, v, None, True, 0.125, 0, 0, start, made=[(2, 4, 256, 64), (2, 4, 256)])
    assert seconds(part, fast_memory) == pytest.approx(flops / 4 * (768 + (256 + 128) / 2) / 1024 / 0.25e12)
    sums = b.given(2, 4, 1024)
    back = b.call(torch.ops.meshc.attention_backward.default, q, q, k, v, None, q, sums, True, 0.125, made=[(2, 4, 1024, 64)] * 3)
    assert seconds(back, fast_memory) == pytest.approx(2.5 * flops * share / 0.25e12)


def test_a_block_of_a_ring_takes_what_the_rank_takes_that_sees_most_of_it() -> None:
    """1024 positions over 4 ranks: of its own keys each sees a triangle, of those of the rank before it all; a window cuts that."""
    b = Building()
    q, k, v = (b.given(2, 4, 256, 64) for _ in range(3))
    here = b.call(spmd.coordinate, "cp", dtype=None)
    before = b.call(spmd.ring_place, here, 1, 4, dtype=None)
    start, first = (b.call(spmd.tile_start, 1024, [4], [place], dtype=None) for place in (here, before))
    fast_memory = replace(ROUND, memory_Bps=1e18, launch_s=0.0)

    def takes(window: int, first: object, causal: bool = True) -> float:
        numbers = window, 0, start, first, 256
        made = [(2, 4, 256, 64), (2, 4, 256)]
        return seconds(b.call(torch.ops.meshc.attention.default, q, k, v, None, causal, 0.125, *numbers, made=made), fast_memory)

    whole = 4 * 2 * 4 * 256 * 256 * 64 / 0.25e12
    assert takes(0, start) == pytest.approx(whole * (256 + 128) / 2 / 256)
    assert takes(0, first) == takes(0, first, causal=False) == pytest.approx(whole)
    assert takes(65, first) == pytest.approx(whole * 64 * 64 / 256**2), "64 queries, which with one mask go through 64 keys"


def test_a_delta_rule_multiplies_within_chunks_of_64_and_with_states() -> None:
    """Positions with those of their chunk, five times; of each position keys with values, three times. A short sequence is one chunk."""

    def takes(positions: int) -> float:
        b = Building()
        keys, values = b.given(2, 4, positions, 16), b.given(2, 4, positions, 8)
        made = [(2, 4, positions, 8), (2, 4, 16, 8)]
        decays = b.given(2, 4, positions)
        return flops(b.call(torch.ops.meshc.delta_rule.default, keys, keys, values, keys, decays, None, made=made))

    assert takes(128) == 2 * takes(64) == 2 * 4 * 128 * (5 * 64 * (16 + 8) + 2 * 3 * 16 * 8)
    assert takes(32) == 2 * 4 * 32 * (5 * 32 * (16 + 8) + 2 * 3 * 16 * 8)


def test_factorizations_grow_with_the_cube_of_a_side() -> None:
    def takes(target: Any, made: list[tuple[int, ...]], *shape: int) -> float:
        b = Building()
        return flops(b.call(target, b.given(*shape), made=made))

    aten = torch.ops.aten
    assert takes(aten._linalg_eigh.default, [(2, 8), (2, 8, 8)], 2, 8, 8) == 2 * 9 * 8**3
    assert takes(aten.linalg_qr.default, [(8, 4), (4, 4)], 8, 4) == pytest.approx(4 * 8 * 4**2 - 4 * 4**3 / 3)
    assert takes(aten.linalg_inv_ex.default, [(8, 8), ()], 8, 8) == 2 * 8**3


def test_an_update_reads_four_and_writes_three_of_each_parameter() -> None:
    b = Building()
    columns = [[b.given(100, 100), b.given(50)] for _ in range(4)]
    steps = [b.given(), b.given()]
    numbers = [b.given(dtype=torch.float64) for _ in range(5)]
    update = b.call(torch.ops.meshc.adam_many_.default, *columns, steps, *numbers, True, False, dtype=None)
    elements = 100 * 100 + 50
    assert moved_bytes(update) == 4 * (4 + 3) * elements + 2 * 4 * 2 + 5 * 8  # steps are written too, numbers read
    assert seconds(update, ROUND) == pytest.approx(moved_bytes(update) / 1e9 + 1e-6)


def test_a_write_in_place_counts_once() -> None:
    b = Building()
    x = b.given(1000)
    added = b.call(aten.add_.Tensor, x, b.given(1000), made=(1000,))
    assert moved_bytes(added) == 3 * 4000 and seconds(added, ROUND) > 0
