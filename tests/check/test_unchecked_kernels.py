"""Operators whose kernels trust their operands: what fits passes, what does not is refused before the kernel sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshc.check.guards import fault, guard_function
from meshc.check.operators import infer_result
from meshc.check.types import Wrong
from meshc.rules import operator_of
from tests.attack.corpus import Call
from tests.attack.written import written

aten = torch.ops.aten
X = torch.randn(1, 1, 4, 4)
GRAD = torch.randn(1, 1, 2, 2)
POOL: tuple[Any, ...] = ([2, 2], [2, 2], [0, 0], [1, 1], False)
FAR = torch.full((1, 1, 2, 2), 1 << 40)
BAG = (torch.randn(10, 4), torch.tensor([1, 3, 9]), torch.tensor([0, 2]))


def test_operands_that_fit_pass() -> None:
    seen = [call for call in written() if operator_of(call.target).preconditions]
    assert len(seen) > 30
    assert {call.name: wrong for call in seen if (wrong := fault(call.target, call.args, call.kwargs))} == {}


@pytest.mark.parametrize(
    ("target", "args", "said"),
    [
        (aten.max_pool2d_with_indices_backward.default, (GRAD, X, *POOL, FAR), "indices holds 1099511627776, where 0 to 15 are possible"),
        (aten.adaptive_max_pool2d_backward.default, (GRAD, X, -FAR), "indices holds -1099511627776"),
        (aten._embedding_bag.default, (BAG[0], torch.tensor([1, 10, 2]), BAG[2]), "indices holds 10, where 0 to 9 are possible"),
        (aten._embedding_bag.default, (*BAG[:2], torch.tensor([0, 4000])), "offsets that do not rise from 0 to 3"),
        (
            aten._embedding_bag_dense_backward.default,
            (torch.randn(2, 4), BAG[1], torch.tensor([0, 0, 7]), torch.tensor([2, 1]), torch.zeros(2), 10, False, 0, None),
            "offset2bag holds 7, where 0 to 1 are possible",
        ),
        (aten._ctc_loss.default, (torch.randn(6, 1, 5), torch.tensor([[9, 1]]), [6], [2]), "targets holds 9"),
        (aten._ctc_loss.default, (torch.randn(6, 1, 5), torch.tensor([[1, 1]]), [60], [2]), "input_lengths are 0 to 6"),
        (aten.fractional_max_pool2d.default, (X, [2, 2], [2, 2], torch.full((1, 1, 2), torch.nan)), "random_samples holds"),
        (aten.lu_unpack.default, (torch.eye(3), torch.tensor([1, 2, 9], dtype=torch.int32)), "LU_pivots holds 9"),
        (aten.linalg_ldl_solve.default, (torch.eye(2), torch.tensor([1, -2], dtype=torch.int32), torch.ones(2, 1)), "half a block"),
        (aten._upsample_nearest_exact1d.default, (X[0], [64], 1e-30), "scales 1e-30 does not make 64 of 4"),
        (aten.upsample_nearest3d.default, (X[None], [6, 4, 4], 6.0, 1e-30, None), "scales_h 1e-30 does not make 4 of 4"),
        (aten._linalg_eigvals.default, (torch.full((2, 2), float("nan")),), "self holds NaN or infinity"),
        (aten._upsample_bilinear2d_aa.default, (X, [17, 18], False, 1.7, 0.9), "scales_h 1.7 does not make 17 of 4"),
        (aten._upsample_bicubic2d_aa_backward.default, (X, [4, 4], [1, 1, 9, 4], False, 0.5, 9.0), "scales_w 9.0 does not make 4 of 4"),
        (
            aten.grid_sampler_2d_backward.default,
            (GRAD, X, torch.full((1, 2, 2, 2), torch.nan), 0, 1, False, [True, True]),
            "grid holds what is no place",
        ),
        (aten.mvlgamma.default, (X + 4, 1 << 20), "p is at most 4096"),
        (aten.floor_divide.default, (torch.tensor([-(1 << 63)]), torch.tensor([-1])), "which -1 in other does not divide"),
        (aten.special_legendre_polynomial_p.n_scalar, (torch.ones(4), 1 << 31), "a degree of at most 4096"),
    ],
)
def test_values_that_kernels_trust_are_looked_at(target: Any, args: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        guard_function(target, _never)(*args)


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the kernel was called")


SHAPES: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
    (aten._adaptive_avg_pool2d_backward.default, (torch.randn(2, 8, 8, 14), torch.randn(2, 0, 2, 2)), "the same dims but for the last 2"),
    (aten._adaptive_avg_pool3d_backward.default, (torch.randn(8, 5, 7, 4), torch.randn(8, 8, 0, 8)), "a channel and a cell"),
    (aten.replication_pad1d_backward.default, (torch.randn(1, 3, 6), torch.randn(5, 1, 3), [1, 2]), "the shape that"),
    (aten._pdist_backward.default, (torch.randn(3), torch.randn(5, 2), 2.0, torch.randn(10)), "each pair of rows"),
    (aten.view.dtype, (torch.randn(2, 2), -1), "must be a dtype"),
    (aten._neg_view.default, (torch.ones(2, dtype=torch.bool),), "a dtype that has negatives"),
    (aten._neg_view.default, (torch.ones(2, dtype=torch.uint16),), "a dtype that has negatives"),
    (aten._neg_view.default, (torch.ones(2).to(torch.float8_e5m2),), "a dtype that has negatives"),
    (aten._fft_r2c.default, (torch.randn(1, 2, 10), [-2], 2, True), "counted from 0"),
    (aten._fft_c2c.default, (torch.randn(4, 4, dtype=torch.complex64), [1, 1], 0, True), "others each"),
]


@pytest.mark.parametrize(("target", "args", "said"), SHAPES)
def test_shapes_that_kernels_trust_are_refused_before_anything_runs(target: Any, args: tuple[Any, ...], said: str) -> None:
    meta = tuple(value.to("meta") if isinstance(value, torch.Tensor) else value for value in args)
    with pytest.raises(Wrong, match=said):
        infer_result(target, meta, {}, 1)


def test_a_call_that_fits_is_made() -> None:
    call = next(call for call in written() if call.target is aten._embedding_bag_forward_only.default)
    assert isinstance(call, Call)
    assert torch.equal(guard_function(call.target, call.target)(*call.args)[0], call.target(*call.args)[0])


@pytest.mark.parametrize(
    ("target", "args"),
    [(aten.fft_rfftfreq.default, (9,)), (aten.zeros.default, ([9],)), (aten.arange.default, (9,)), (aten.eye.default, (3,))],
)
def test_what_is_made_of_sizes_alone_takes_no_memory_while_it_is_checked(target: Any, args: tuple[Any, ...]) -> None:
    for device in ({}, {"device": None}, {"device": torch.device("cpu")}):
        assert infer_result(target, args, device, 1).is_meta
