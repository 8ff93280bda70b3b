"""Functions under autocast, one by one: values and gradients are torch's bit for bit, and on CUDA its dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from meshc.errors import CompileError
from meshc.passes.trace.lower_autocast import as_casts
from tests.passes.trace.autocast import BF16, F64, FUNCTIONS, as_in_capture, call_of, region_of, same, tensors


@pytest.fixture(autouse=True)
def _as_in_capture() -> Iterator[None]:
    with as_in_capture():
        yield


def weighted(outputs: list[Tensor]) -> Tensor:
    outputs = [out for out in outputs if out.requires_grad]
    return sum((out.double() * torch.linspace(0.5, 1.5, out.numel(), dtype=F64).view(out.shape)).sum() for out in outputs)  # type: ignore


def attempt(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (RuntimeError, TypeError, IndexError) as error:  # an operator may lack the dtype; then it must lack it here too
        return error


@pytest.mark.parametrize("inputs", ["float32", "bfloat16", "mixed"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_cpu_values_and_gradients_are_torchs_bit_for_bit(name: str, inputs: str) -> None:
    function, args = call_of(name, inputs)
    traced, leaves = region_of(function, args, {}, "cpu")

    def reference() -> Any:
        with torch.autocast("cpu", BF16):
            return function(*args)

    want = attempt(reference)
    if isinstance(want, Exception):
        with pytest.raises((CompileError, RuntimeError)):
            torch.fx.Interpreter(as_casts(traced).module).run(*leaves)
        return
    got = torch.fx.Interpreter(as_casts(traced).module).run(*leaves)
    assert [same(a, b) for a, b in zip(tensors(got), tensors(want), strict=True)] == [True] * len(tensors(want))
    sources = [leaf for leaf in leaves if leaf.requires_grad]
    gradients = [attempt(lambda out=out: torch.autograd.grad(weighted(tensors(out)), sources, allow_unused=True)) for out in (got, want)]
    if isinstance(gradients[1], Exception):
        assert str(gradients[0]) == str(gradients[1])
    else:
        assert all(same(a, b) for a, b in zip(*gradients, strict=True))


def on_fake_cuda(function: Any, args: Any) -> list[torch.dtype]:
    """The dtypes that torch's own CUDA autocast gives, without a GPU: its kernels run over fake CUDA tensors."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fakes = pytree.tree_map(
            lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device="cuda") if isinstance(leaf, Tensor) else leaf, args
        )
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", BF16)
        try:
            return [leaf.dtype for leaf in tensors(function(*fakes))]
        finally:
            torch.set_autocast_enabled("cuda", before[0])
            torch.set_autocast_dtype("cuda", before[1])
            torch.clear_autocast_cache()


WITHOUT_A_GPU_TORCH_CANNOT = ("grid_sample", "multi-head attention", "multi-head attention, masked", "gru_cell", "lstm")
"""Functions that want a CUDA context, or a kernel without a fake one, even for fake tensors."""


@pytest.mark.parametrize("inputs", ["float32", "bfloat16", "mixed"])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in WITHOUT_A_GPU_TORCH_CANNOT])
def test_cuda_dtypes_are_torchs(name: str, inputs: str) -> None:
    function, args = call_of(name, inputs)
    traced, _ = region_of(function, args, {}, "cuda")
    want = attempt(lambda: on_fake_cuda(function, args))
    if isinstance(want, Exception):
        assert "dtype" in str(want)
        with pytest.raises(CompileError, match="dtype"):
            as_casts(traced)
        return
    as_casts(traced)
    fakes = [node.meta["example_value"] for node in traced.module.graph.find_nodes(op="placeholder")]
    with traced.fake_mode, torch.no_grad():
        assert [leaf.dtype for leaf in tensors(torch.fx.Interpreter(traced.module).run(*fakes))] == want
