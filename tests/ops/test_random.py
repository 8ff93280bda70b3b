"""Random operators: the generator against published vectors, every tiling against the whole, kernels against each other, and statistics."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshc.ops import philox, random
from tests.ops.drawn import FLOATS, ops, seeded

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, block.
VECTORS = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def numpy_uniform(seed: int, step: int, call: int, n: int) -> numpy.ndarray:
    """The ten lines of docs/randomness.md, as they stand there."""
    text = (Path(__file__).parents[2] / "docs" / "randomness.md").read_text()
    names: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    return names["uniform32"](seed, step, call, n)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...], compiled: bool) -> None:
    assert tuple(philox.block(counter, key, compiled)) == expected


def test_first_draw_is_the_first_known_answer() -> None:
    drawn = random.uniform(random.seed_step(0, 0), 0, (4,))
    assert [int(value) for value in drawn.double() * 2**24] == [word >> 8 for word in VECTORS[0][2]]
    wide = random.uniform(random.seed_step(0, 0), 0, (2,), torch.float64)
    assert int(wide[0] * 2**53) == (0x6627E8D5 << 32 | 0xE169C58D) >> 11
    assert int(wide[1] * 2**53) == (0xBC57AC4C << 32 | 0x9B00DBD8) >> 11


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5, 2**64 - 1])
def test_ten_lines_of_numpy(seed: int) -> None:
    assert (numpy_uniform(seed, 11, 5, 1001) == random.uniform(random.seed_step(seed, 11), 5, (7, 11, 13)).numpy().ravel()).all()


def test_normal_is_box_muller() -> None:
    words = numpy_uniform(99, 1, 2, 4000).astype(numpy.float64).reshape(-1, 2)
    radius, angle = numpy.sqrt(-2 * numpy.log(words[:, 0] + 2.0**-24)), 2 * math.pi * words[:, 1]
    expected = numpy.stack([radius * numpy.cos(angle), radius * numpy.sin(angle)], 1).ravel()
    assert numpy.abs(random.normal(random.seed_step(99, 1), 2, (4000,)).numpy() - expected).max() < 1e-6


def test_normal_float64_is_box_muller() -> None:
    first = [(VECTORS[0][2][0] << 32 | VECTORS[0][2][1]) >> 11, (VECTORS[0][2][2] << 32 | VECTORS[0][2][3]) >> 11]
    radius, angle = math.sqrt(-2 * math.log((first[0] + 1) / 2**53)), 2 * math.pi * first[1] / 2**53
    drawn = random.normal(random.seed_step(0, 0), 0, (2,), torch.float64)
    assert drawn.tolist() == pytest.approx([radius * math.cos(angle), radius * math.sin(angle)], rel=1e-14)


@st.composite
def tiles(draw: Callable[..., Any]) -> tuple[list[int], list[int], list[int]]:
    """A global shape and a tile of it that may reach past the end; long rows as well as short ones."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)) + [draw(st.integers(1, 90))]
    offsets = [draw(st.integers(0, size - 1)) for size in shape]
    return shape, [draw(st.integers(1, size)) for size in shape], offsets


def take(whole: Tensor, local: list[int], offsets: list[int]) -> Tensor:
    for dim, (size, offset) in enumerate(zip(local, offsets, strict=True)):
        whole = whole.narrow(dim, offset, min(size, whole.shape[dim] - offset))
    return whole


DRAWS: dict[str, Callable[..., Tensor]] = {
    "uniform": lambda *tile: ops.uniform(seeded(), 4, *tile, torch.float32),
    "uniform64": lambda *tile: ops.uniform(seeded(), 4, *tile, torch.float64),
    "uniform_bf16": lambda *tile: ops.uniform(seeded(), 4, *tile, torch.bfloat16),
    "normal": lambda *tile: ops.normal(seeded(), 4, *tile, torch.float32),
    "normal64": lambda *tile: ops.normal(seeded(), 4, *tile, torch.float64),
    "keep_mask": lambda *tile: ops.keep_mask(seeded(), 4, 0.3, *tile),
    "dropout": lambda *tile: ops.dropout(torch.ones(tile[1]), seeded(), 4, 0.3, *tile)[0],
    "dropout64": lambda *tile: ops.dropout(torch.ones(tile[1], dtype=torch.float64), seeded(), 4, 0.3, *tile)[0],
    "dropout_mask": lambda *tile: ops.dropout(torch.ones(tile[1]), seeded(), 4, 0.3, *tile)[1],
}


@pytest.mark.parametrize("name", DRAWS)
@settings(max_examples=40)
@given(tiles())
def test_a_tile_is_a_part_of_the_whole(name: str, tile: tuple[list[int], list[int], list[int]]) -> None:
    shape, local, offsets = tile
    draw = DRAWS[name]
    whole, part = draw(shape, shape, [0] * len(shape)), draw(shape, local, offsets)
    assert list(part.shape) == local
    assert part.isfinite().all()
    expected = take(whole, local, offsets)
    assert torch.equal(part[tuple(slice(size) for size in expected.shape)], expected)


@pytest.mark.parametrize("name", ["uniform", "uniform64", "normal", "normal64", "keep_mask", "dropout"])
@settings(max_examples=10)
@given(tiles())
def test_without_a_compiler_the_bits_are_the_same(name: str, tile: tuple[list[int], list[int], list[int]]) -> None:
    shape, local, offsets = tile
    compiled = DRAWS[name](shape, local, offsets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(philox, "library", lambda: None)
        assert torch.equal(DRAWS[name](shape, local, offsets), compiled)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("row", [7, 1 << 12])
def test_threads_do_not_matter(threads: int, row: int) -> None:
    rows = (1 << 19) // row
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        drawn = ops.uniform(seeded(), 0, [rows, row + 3], [rows, row], [0, 2], torch.float32)
    finally:
        torch.set_num_threads(before)
    whole = torch.from_numpy(numpy_uniform(1234567890123456789, 3, 0, rows * (row + 3))).view(rows, row + 3)
    assert torch.equal(drawn, whole[:, 2 : row + 2])


def test_indices_are_64_bits_wide() -> None:
    shape, offset = [1 << 20, 1 << 20], [(1 << 20) - 1, (1 << 20) - 40]
    near_end = ops.uniform(seeded(), 0, shape, [1, 40], offset, torch.float32).flatten()
    one_by_one = torch.cat([ops.uniform(seeded(), 0, [1 << 40], [1], [(1 << 40) - 40 + i], torch.float32) for i in range(40)])
    assert torch.equal(near_end, one_by_one)
    same_low_bits = ops.uniform(seeded(), 0, [1 << 40], [40], [(1 << 34) - 40], torch.float32)
    assert not torch.equal(near_end, same_low_bits)


def test_dropout_takes_x_in_another_shape() -> None:
    """A dim of 12 = 3 heads of 4, split over the heads: the tile has one dim more than x."""
    x = torch.randn(5, 12)
    whole = random.dropout(x, seeded(), 2, 0.4)
    part, mask = ops.dropout(x[:, 4:8], seeded(), 2, 0.4, [5, 3, 4], [5, 1, 4], [0, 1, 0])
    assert part.shape == mask.shape == (5, 4)
    assert torch.equal(part, whole[:, 4:8])


def test_empty_and_scalar() -> None:
    assert random.uniform(seeded(), 0, (0, 3)).shape == (0, 3)
    assert random.dropout(torch.ones(0, 3), seeded(), 0, 0.5).shape == (0, 3)
    assert random.uniform(seeded(), 0, ()).shape == ()


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        ops.uniform(seeded(), 0, [4], [2, 2], [0], torch.float32)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        random.keep_mask(seeded(), 0, 1.5, (3,))
    with pytest.raises(ValueError, match="local shape"):
        ops.dropout(torch.ones(3), seeded(), 0, 0.5, [4], [4], [0])
    with pytest.raises(TypeError, match="int32"):
        random.uniform(seeded(), 0, (3,), torch.int32)


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_statistics(dtype: torch.dtype) -> None:
    n = 1 << 18
    drawn = random.uniform(seeded(), 0, (n,), dtype).double()
    assert drawn.min() >= 0 and drawn.max() < 1
    step = torch.finfo(dtype).eps / 2  # values lie on multiples of this, rounded down
    assert abs(drawn.mean() - (0.5 - step / 2)) < 4 / math.sqrt(12 * n)
    assert abs(drawn.var() - 1 / 12) < 0.001
    bins = torch.histc(drawn, 64, 0, 1)
    chi_square = ((bins - n / 64) ** 2 / (n / 64)).sum()
    assert 25 < chi_square < 120  # 63 degrees of freedom: 63 +- 11


@pytest.mark.parametrize("dtype", FLOATS)
def test_normal_statistics(dtype: torch.dtype) -> None:
    n = 1 << 18
    drawn = random.normal(seeded(), 0, (n,), dtype).double()
    assert abs(drawn.mean()) < 4 / math.sqrt(n)
    assert abs(drawn.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((drawn**4).mean() - 3) < 0.1
    for bound in (-2.0, -1.0, 0.5, 2.5):
        below = 0.5 * (1 + math.erf(bound / math.sqrt(2)))
        assert abs((drawn < bound).double().mean() - below) < 0.005


def test_calls_steps_seeds_and_neighbours_are_independent() -> None:
    n = 1 << 17
    base = random.uniform(random.seed_step(1, 1), 1, (n,)) - 0.5
    others = [
        random.uniform(random.seed_step(1, 1), 2, (n,)),
        random.uniform(random.seed_step(1, 2), 1, (n,)),
        random.uniform(random.seed_step(2, 1), 1, (n,)),
        random.uniform(random.seed_step(1 + (1 << 32), 1), 1, (n,)),
        base.roll(1) + 0.5,
        base.roll(4) + 0.5,
    ]
    for other in others:
        assert abs(12 * (base * (other - 0.5)).mean()) < 5 / math.sqrt(n)


def test_step_and_call_count_modulo_two_to_the_32() -> None:
    assert torch.equal(random.uniform(random.seed_step(1, 5), 7, (9,)), random.uniform(random.seed_step(1, 5 + 2**32), 7 + 2**32, (9,)))
