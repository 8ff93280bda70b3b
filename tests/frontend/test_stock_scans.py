"""Recurrences of stock models are traced in a form of meshc's own: what it means, when it stands in, and that nothing is left behind."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import meshc
from meshc.frontend.libraries import stock_scans
from meshc.frontend.libraries.stock_scans import STANDING, traced_scans
from tests.broad import broad
from tests.zoo.families import Stock
from tests.zoo.recurrent import FAMILIES
from tests.zoo.stock import STOCK

modeling = pytest.importorskip("transformers.models.mamba.modeling_mamba")


def scanned(function: Any, dtype: torch.dtype, **how: Any) -> list[Tensor]:
    torch.manual_seed(0)
    x, dt, gate = (torch.randn(2, 6, 9, dtype=dtype) for _ in range(3))
    b, c = torch.randn(2, 4, 9, dtype=dtype), torch.randn(2, 4, 9, dtype=dtype)
    leaves = [x, dt, -torch.rand(6, 4), b, c]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    made = function(*leaves, D=torch.randn(6), z=gate, delta_bias=torch.randn(6), delta_softplus=True, **how)
    made = made if isinstance(made, tuple) else (made,)
    return [*made, *torch.autograd.grad(sum(one.float().square().sum() for one in made), leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("last", [False, True])
def test_a_selective_scan_and_its_gradients(dtype: torch.dtype, last: bool) -> None:
    ours, theirs = (scanned(one, dtype, return_last_state=last) for one in (stock_scans.selective_scan, modeling.mamba_selective_scan))
    near = {torch.bfloat16: 5e-2, torch.float32: 1e-4, torch.float64: 1e-10}[dtype]  # the state is float32 for both dtypes of fewer bits
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.dtype == its.dtype
        torch.testing.assert_close(mine, its, rtol=near, atol=near)


@pytest.mark.parametrize("taps", [1, 3, 4])
def test_a_short_convolution(taps: int) -> None:
    x, weight, bias = torch.randn(2, 5, 7), torch.randn(5, taps), torch.randn(5)
    for how in ({"bias": None}, {"bias": bias}, {"bias": bias, "activation": "silu"}):
        torch.testing.assert_close(stock_scans.short_convolution(x, weight, **how), modeling.causal_conv1d_fn(x, weight, **how))


DELTA = ("lara_mini", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp")
"""Models with a gated delta rule, each in a module of its own."""


def corrected(function: Any, dtype: torch.dtype, tokens: int, begun: bool) -> list[Tensor]:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, tokens, heads, 6, dtype=dtype) for heads in (2, 2, 4))
    leaves = [query, key, value, -torch.rand(2, tokens, 4), torch.rand(2, tokens, 4, dtype=dtype), torch.randn(2, 4, 6, 6)]
    query, key, value, g, beta, state = (leaf.requires_grad_() for leaf in leaves)
    how = {"initial_state": state if begun else None, "output_final_state": begun}
    made = function(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True, **how)
    given = leaves if begun else leaves[:5]
    made = [one for one in made if one is not None]
    return [*made, *torch.autograd.grad(sum(one.float().square().sum() for one in made), given)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens, begun", [(9, False), (70, True)])
def test_a_gated_delta_rule_and_its_gradients(dtype: torch.dtype, tokens: int, begun: bool) -> None:
    """Chunk by chunk as the model does it, and token by token."""
    found = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    ours = corrected(stock_scans.gated_delta_rule, dtype, tokens, begun)
    near = {torch.bfloat16: 2e-2, torch.float32: 1e-4}[dtype]  # only what comes in and what goes out is rounded to fewer bits
    for function in (found.torch_chunk_gated_delta_rule, found.torch_recurrent_gated_delta_rule):
        for mine, its in zip(ours, corrected(function, dtype, tokens, begun), strict=True):
            assert mine.dtype == its.dtype and mine.shape == its.shape
            torch.testing.assert_close(mine, its, rtol=near, atol=near)


@pytest.mark.parametrize("name", DELTA)
def test_it_stands_in_for_each_family(name: str) -> None:
    found = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    theirs = found.torch_chunk_gated_delta_rule
    with traced_scans():
        assert found.torch_chunk_gated_delta_rule is stock_scans.gated_delta_rule
    assert found.torch_chunk_gated_delta_rule is theirs


AROUND = {"autocast": lambda: torch.autocast("cpu", torch.bfloat16), "fake": FakeTensorMode, "meta": lambda: torch.device("meta")}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_it_stands_in_whatever_is_around_the_first_compilation(around: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    monkeypatch.setattr(stock_scans, "_found", WeakKeyDictionary())
    with around(), traced_scans():
        assert found.torch_chunk_gated_delta_rule is stock_scans.gated_delta_rule


def averaged(function: Any, dtype: torch.dtype, begun: bool) -> list[Tensor]:
    torch.manual_seed(0)
    leaves = [torch.randn(6), torch.randn(6), 3 * torch.randn(2, 40, 6, dtype=dtype), torch.randn(2, 40, 6, dtype=dtype)]
    state = [torch.randn(2, 6), torch.rand(2, 6), 3 * torch.randn(2, 6)] if begun else None
    leaves = [leaf.requires_grad_() for leaf in leaves]
    made, last = function(*leaves, state=state, return_state=True)
    return [made, *last, *torch.autograd.grad(made.float().square().sum() + sum(one.square().sum() for one in last), leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("begun", [False, True])
def test_a_decaying_average_and_its_gradients(dtype: torch.dtype, begun: bool) -> None:
    """RWKV's, whose sums would be beyond all numbers but for the peak that is kept beside them."""
    found = pytest.importorskip("transformers.models.rwkv.modeling_rwkv")
    ours, theirs = (averaged(one, dtype, begun) for one in (stock_scans.decaying_average, found.rwkv_linear_attention))
    near = {torch.bfloat16: 2e-2, torch.float32: 1e-4}[dtype]
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.dtype == its.dtype
        torch.testing.assert_close(mine, its, rtol=near, atol=near)


def test_a_decaying_average_of_keys_beyond_the_range_of_exponentials() -> None:
    found = pytest.importorskip("transformers.models.rwkv.modeling_rwkv")
    given = torch.tensor([-9.0, 3.0]), torch.zeros(2), 300 * torch.randn(2, 200, 2), torch.randn(2, 200, 2)
    torch.testing.assert_close(stock_scans.decaying_average(*given)[0], found.rwkv_linear_attention(*given)[0], rtol=1e-3, atol=1e-4)


def test_they_stand_in_while_a_model_is_traced() -> None:
    names = ("mamba_selective_scan", "causal_conv1d_fn")
    before = {name: getattr(modeling, name) for name in names}
    with traced_scans():
        assert {name: getattr(modeling, name) for name in names} == {name: STANDING[name][0] for name in names}
    assert {name: getattr(modeling, name) for name in names} == before


def test_a_function_of_that_name_that_means_something_else_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(hidden_states: Tensor, *given: Tensor, **how: Any) -> Any:
        made = stock_scans.selective_scan(hidden_states.flip(-1), *given, **how)
        return tuple(made) if isinstance(made, tuple) else made

    monkeypatch.setattr(modeling, "mamba_selective_scan", backwards)
    monkeypatch.setattr(modeling, "causal_conv1d_fn", lambda x, kernel: x)
    with traced_scans():
        assert modeling.mamba_selective_scan is backwards
        assert modeling.causal_conv1d_fn is not STANDING["causal_conv1d_fn"][0]


@pytest.mark.parametrize(
    "stock, operator, layers",
    [(STOCK["mamba"], "recurrence", 2), broad(FAMILIES["qwen3_next"], "delta_rule", 1), broad(FAMILIES["rwkv"], "recurrence", 4)],
)
def test_a_program_does_not_grow_with_the_sequence(stock: Stock, operator: str, layers: int) -> None:
    def calls(tokens: int) -> list[str]:
        case = stock.case(operator)
        ids = torch.randint(0, 65, (4, tokens))
        step = meshc.TrainStep(case.model, optimizer=torch.optim.SGD(case.model.parameters(), lr=0.1))
        kwargs = {"input_ids": ids, "labels": ids}
        program = meshc.compile(step, meshc.Mesh("dp=2"), kwargs=kwargs, options=meshc.Options(remat="none"))
        return [str(node.target) for node in program.lowered.placed.graph.nodes if node.op == "call_function"]

    short = calls(8)
    assert short == calls(130)  # of the delta rule three chunks
    assert short.count(f"meshc.{operator}.default") == short.count(f"meshc.{operator}_backward.default") == layers
