"""Laws of operators that a proof uses beside their rules (the table of docs/proof.md), each on values drawn at random."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch import Tensor

from meshc.ops.implementations import register_operators

register_operators()
aten, meshc = torch.ops.aten, torch.ops.meshc
SEEDS = range(3)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def choices(tokens: int, most: int, experts: int, seed: int) -> Tensor:
    """[1, tokens, most] of one group; -1 where there is no further one."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(experts, generator=generator)[:most] for _ in range(tokens)]
    found = torch.stack(rows).where(torch.rand((tokens, most), generator=generator) > 0.4, torch.tensor(-1))
    return found.sort(1, descending=True).values.unsqueeze(0)


def equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_pieces_and_rows_are_slices(seed: int) -> None:
    x = drawn(7, 6, seed=seed)
    for at, piece in enumerate(aten.split.Tensor(x, 3)):
        assert torch.equal(piece, aten.slice.Tensor(x, 0, 3 * at, min(7, 3 * at + 3)))
    for at, piece in enumerate(aten.split_with_sizes.default(x, [1, 3, 2], 1)):
        start = sum([1, 3, 2][:at])
        assert torch.equal(piece, aten.slice.Tensor(x, 1, start, start + [1, 3, 2][at]))
    for at, row in enumerate(aten.unbind.int(x, 1)):
        assert torch.equal(row, aten.slice.Tensor(x, 1, at, at + 1).reshape(7)) and torch.equal(row, aten.select.int(x, 1, at))


def test_a_sum_is_its_addends_in_any_order_and_zeros_are_none() -> None:
    parts = [drawn(3, 4, seed=seed) for seed in range(4)]
    whole = sum(parts)
    assert all(equal(torch.zeros(3, 4, dtype=torch.float64) + sum(order), whole) for order in permutations(parts))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_call_on_a_repeated_value_is_the_call_on_it_once(seed: int) -> None:
    x = drawn(3, 1, 4, seed=seed)
    for call in (aten.exp.default, aten.gelu.default, aten.neg.default, lambda x: aten.mul.Scalar(x, 0.3)):
        assert torch.equal(call(x.expand(3, 5, 4)), call(x).expand(3, 5, 4))


def test_one_number_everywhere_is_one_number_wherever_it_is_moved() -> None:
    x = aten.full.default([4, 6], 0.5)
    assert torch.equal(torch.cat([x[:2], x[2:]], 1), aten.full.default([2, 12], 0.5))
    assert torch.equal(x.reshape(8, 3), x[:1, :1].expand(8, 3))


@pytest.mark.parametrize("seed", SEEDS)
def test_which_results_are_computed_changes_none(seed: int) -> None:
    grad, x, w = drawn(2, 3, 4, 4, seed=seed), drawn(2, 2, 4, 4, seed=seed + 1), drawn(3, 2, 3, 3, seed=seed + 2)
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    whole = aten.convolution_backward.default(grad, x, w, [3], *rest, [True, True, True])
    for at in range(3):
        alone = aten.convolution_backward.default(grad, x, w, [3], *rest, [at == place for place in range(3)])
        assert equal(alone[at], whole[at])
    y, weight, bias = drawn(5, 4, seed=seed), drawn(4, seed=seed), drawn(4, seed=seed + 1)
    _, mean, rstd = aten.native_layer_norm.default(y, [4], weight, bias, 1e-5)
    args = (drawn(5, 4, seed=seed + 3), y, [4], mean, rstd, weight, bias)
    whole = aten.native_layer_norm_backward.default(*args, [True, True, True])
    for at in range(3):
        assert equal(aten.native_layer_norm_backward.default(*args, [at == place for place in range(3)])[at], whole[at])


@pytest.mark.parametrize("seed", SEEDS)
def test_what_one_group_has_is_what_all_groups_have(seed: int) -> None:
    own, x, rows = choices(6, 2, 3, seed), drawn(6, 4, seed=seed), drawn(1, 6, 2, 4, seed=seed + 1)
    assert torch.equal(meshc.in_slots(x.unsqueeze(0), own), meshc.to_groups(x, own))
    assert equal(meshc.over_slots(rows, own).reshape(6, 4), meshc.from_groups(rows, own))
    left, right, choice = drawn(1, 12, 4, seed=seed), drawn(1, 12, 3, seed=seed + 2), own.reshape(1, 12)
    one, other = (meshc.group_outer(a, b, choice, 3, 3, 0.5) for a, b in ((left, right), (right, left)))
    assert equal(one, other.transpose(1, 2))


@pytest.mark.parametrize("seed", SEEDS)
def test_used_rows_are_all_rows_where_there_are_any(seed: int) -> None:
    own, x, w = choices(6, 2, 3, seed), drawn(6, 4, seed=seed), drawn(3, 4, 5, seed=seed + 1)
    used, ends = meshc.used_rows(own, 3)
    there, flat = used[0], own.reshape(1, 12)
    rows = meshc.rows_of_tokens(x, used, 2)
    whole = meshc.to_groups(x, own).reshape(1, 12, 4)
    assert torch.equal(rows, whole[:, there]) and torch.equal(meshc.rows_of_places(whole, used), whole[:, there])
    product = meshc.group_mm(whole, w, flat, 3, 0.5)
    assert equal(meshc.used_mm(rows, w, ends, 0.5), product[:, there])
    assert equal(meshc.used_outer(rows, product[:, there], ends, 0.5), meshc.group_outer(whole, product, flat, 3, 3, 0.5))
    assert equal(meshc.tokens_of_rows(product[:, there], used, 6, 2), meshc.from_groups(product.reshape(1, 6, 2, 5), own))
    assert torch.equal(meshc.places_of_rows(product[:, there], used, 12)[:, there], product[:, there])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_gradient_of_a_slice_is_what_it_is_given_among_zeros(seed: int) -> None:
    x = drawn(1, 5, 4, seed=seed)
    assert torch.equal(aten.slice_backward.default(x, [1, 5, 4], 2, 0, 4, 1), x)
    assert torch.equal(aten.slice_backward.default(x, [1, 5, 9], 2, 1, 9, 2), meshc.rows_spread(x, 2, 9, 1, 2))
    row = drawn(1, 5, seed=seed)
    assert torch.equal(aten.select_backward.default(row, [1, 5, 3], 2, 1), meshc.rows_spread(row.unsqueeze(2), 2, 3, 1, 1))


@pytest.mark.parametrize("mode", [0, 1])
def test_bags_that_are_added_up_read_no_largest_rows(mode: int) -> None:
    rows, offsets = torch.tensor([1, 2, 4, 4, 0, 3]), torch.tensor([0, 2, 2, 5])
    _, bags, sizes, _ = aten._embedding_bag.default(drawn(5, 3), rows, offsets, False, mode)
    given = (drawn(4, 3, seed=1), rows, offsets, bags, sizes)
    one, other = (aten._embedding_bag_backward.default(*given, most, 5, False, mode, False, None) for most in (sizes, sizes * 0))
    assert torch.equal(one, other)


def test_values_without_elements_are_one_value() -> None:
    assert torch.equal(torch.zeros(3, 0, 2), torch.full((3, 0, 2), 7.0)) and torch.equal(torch.zeros(0).sum(), torch.zeros(()))
