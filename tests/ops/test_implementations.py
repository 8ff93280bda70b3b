"""What generated code calls in an operator's place gives what the operator gives."""

from __future__ import annotations

import pytest
import torch

from meshc.ops.implementations import _BOUND, direct
from meshc.private import OpOverload

X, Y, W = (torch.randn(4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in range(3))
ASKED: dict[str, list[tuple[tuple[object, ...], dict[str, object]]]] = {
    "add.Tensor": [((X, Y), {}), ((X, 2), {}), ((X.int(), Y), {"alpha": 2}), ((X.int(), 1.5), {})],
    "addmm": [((X[0], Y, W), {}), ((X, Y, W), {"beta": 0.5, "alpha": 2})],
    "bmm": [((X[None], Y[None]), {})],
    "cat": [(([X, Y],), {}), (([X, Y], -1), {})],
    "div.Tensor": [((X, Y), {}), ((X, 4), {}), ((X.int(), 3), {})],
    "exp": [((X,), {}), ((X.int(),), {})],
    "mean.dim": [((X, [1], True), {}), ((X, [0]), {"dtype": torch.float32}), ((X, None), {})],
    "mm": [((X, Y), {})],
    "mul.Tensor": [((X, Y), {}), ((X.int(), 2.5), {}), ((X.bool(), Y), {})],
    "native_layer_norm": [((X, [4], W[0], None, 1e-5), {}), ((X, [4], None, None, 1e-5), {})],
    "neg": [((X,), {})],
    "permute": [((X, [1, 0]), {})],
    "reshape": [((X, [2, 8]), {}), ((X.t(), [16]), {})],
    "rsqrt": [((X.abs(),), {}), ((X.int().abs(),), {})],
    "sub.Tensor": [((X, Y), {}), ((X, 2), {}), ((X, Y.int()), {"alpha": 3})],
    "sum.dim_IntList": [((X, [0], True), {}), ((X.bool(), [1]), {}), ((X, [0]), {"dtype": torch.float32}), ((X, []), {})],
    "t": [((X,), {}), ((X[0],), {})],
    "transpose.int": [((X, 0, -1), {})],
    "unsqueeze": [((X, -1), {})],
}


@pytest.mark.parametrize("target", _BOUND, ids=str)
def test_what_torch_binds_by_itself_gives_what_the_operator_gives(target: OpOverload) -> None:
    bound = direct(target, torch.device("cpu"))
    assert bound is _BOUND[target] is not target._op
    for args, kwargs in ASKED[str(target).removeprefix("aten.").removesuffix(".default")]:
        found, wanted = bound(*args, **kwargs), target(*args, **kwargs)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        results = zip(*([value] if isinstance(value, torch.Tensor) else value for value in (found, wanted)), strict=True)
        assert all(one.dtype == other.dtype and one.stride() == other.stride() for one, other in results)
