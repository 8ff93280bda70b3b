"""Attention written out where no kernel fits: what torch gives, in the corners too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.ops.attention import attention, attention_backward
from meshc.ops.sdpa import sdpa


def operands(*shape: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def with_gradients(function: object, tensors: list[Tensor], **how: object) -> list[Tensor]:
    out = function(*tensors, **how)  # type: ignore[operator]
    return [out, *torch.autograd.grad(out.square().sum() + out.sum(), tensors)]


def dense(q: Tensor, k: Tensor, v: Tensor, window: int, offset: int) -> Tensor:
    at, keys = torch.arange(q.shape[2]).unsqueeze(1) + offset, torch.arange(k.shape[2])
    seen = (keys <= at) & (keys > at - (window or 10**9))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


@pytest.mark.parametrize("queries,keys", [(5, 5), (3, 7), (300, 300), (130, 400), (1, 9)])
@pytest.mark.parametrize("window", [0, 1, 4, 150])
@pytest.mark.parametrize("offset", [0, 1, 4, 270])
def test_offsets_and_windows_are_what_a_dense_mask_says(queries: int, keys: int, window: int, offset: int) -> None:
    """Blocks of 128 rows at least, so the larger sizes have several. Queries that see nothing give zeros, and nothing flows back."""
    shapes = ((2, 3, queries, 4), (2, 3, keys, 4), (2, 3, keys, 4))
    torch.manual_seed(0)
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    found = with_gradients(lambda *x: attention(*x, None, True, 0.5, window, offset)[0], tensors)
    wanted = with_gradients(lambda *x: dense(*x, window, offset), tensors)
    torch.testing.assert_close(found, wanted)


def test_bfloat16_and_the_layout_of_what_comes_back() -> None:
    q, k, v = (torch.randn(2, 3, 200, 4).bfloat16().transpose(1, 2).contiguous().transpose(1, 2) for _ in range(3))
    for how in ((0, 3), (16, 0), (16, 3)):
        out, lse = attention(q, k, v, None, True, 0.5, *how)
        kernel, sums = attention(q, k, v, None, True, 0.5)
        assert (out.stride(), lse.stride(), out.dtype, lse.dtype) == (kernel.stride(), sums.stride(), kernel.dtype, sums.dtype)
        wide = [x.float() for x in (q, k, v)]
        torch.testing.assert_close(out.float(), dense(*wide, *how), rtol=2e-2, atol=2e-2)
        back = [x.stride() for x in attention_backward(out, q, k, v, None, out, lse, True, 0.5, *how)]
        assert back == [x.stride() for x in attention_backward(out, q, k, v, None, kernel, sums, True, 0.5)]


def test_a_window_is_a_causal_mask_without_a_bias() -> None:
    q = torch.randn(1, 1, 3, 4)
    for how in ((None, False, 0.5, 2, 0), (q.new_zeros(1, 1, 3, 3), True, 0.5, 0, 1), (None, True, 0.5, -1, 0)):
        with pytest.raises(ValueError, match="says what a causal mask without a bias is"):
            attention(q, q, q, *how)


MASK = torch.tensor([[True, False, True], [False, False, False], [True, True, False]])


@pytest.mark.parametrize("mask", [None, MASK, torch.zeros(3, 3).masked_fill(~MASK, -torch.inf).double()], ids=["none", "bool", "float"])
def test_three_dims_give_what_torch_gives_also_for_a_query_that_sees_nothing(mask: Tensor | None) -> None:
    found = with_gradients(sdpa, operands(2, 3, 4), attn_mask=mask)
    torch.testing.assert_close(found, with_gradients(F.scaled_dot_product_attention, operands(2, 3, 4), attn_mask=mask))
    assert mask is None or not found[0][:, 1].any()


def test_dropout_of_everything_gives_zeros_and_draws_nothing() -> None:
    found = with_gradients(sdpa, operands(1, 2, 3, 4), dropout_p=1.0)
    assert not any(tensor.any() for tensor in found)
    q, k, v = operands(1, 2, 3, 4)
    v = v.detach().index_fill(3, torch.tensor([0]), torch.inf)
    assert torch.equal(sdpa(q, k, v, dropout_p=1.0).isnan(), F.scaled_dot_product_attention(q, k, v, dropout_p=1.0).isnan())
    for p in (1.5, -0.5):
        with pytest.raises(ValueError, match=f"between 0 and 1, but got {p}"):
            sdpa(q, k, v, dropout_p=p)


def test_a_query_that_sees_nothing_stays_zero_under_dropout() -> None:
    seed = torch.zeros(2, dtype=torch.int64)
    found = with_gradients(sdpa, operands(1, 2, 3, 4), attn_mask=MASK, dropout_p=0.5, seed_step=seed)
    assert not found[0][:, :, 1].any() and all(tensor.isfinite().all() for tensor in found)


class Attention(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.qkv, self.p = nn.Linear(8, 24), p

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 2).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.p).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("p", [0.5, 1.0])
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "tp=3"])
def test_a_compiled_module_means_the_module(p: float, mesh: str) -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(2, 3, 8), "mask": MASK}
    program = meshc.compile(Attention(p), meshc.Mesh(mesh), kwargs=inputs)
    assert meshc.verify(program, dtype=torch.float64).ok


@pytest.mark.parametrize("causal", [False, True])
def test_operands_may_have_any_strides(causal: bool) -> None:
    """torch's CPU kernel reads past the end of a head whose numbers do not lie side by side."""

    def turned() -> list[Tensor]:
        return [x.detach().mT.contiguous().mT.requires_grad_() for x in operands(9, 2, 12, 4)]

    found = with_gradients(sdpa, turned(), is_causal=causal)
    torch.testing.assert_close(found, with_gradients(F.scaled_dot_product_attention, operands(9, 2, 12, 4), is_causal=causal))


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_no_query_or_no_key_is_what_torch_makes_of_it(queries: int, keys: int) -> None:
    q, k, v = (torch.randn(1, 2, count, 8, requires_grad=True) for count in (queries, keys, keys))
    out = attention(q, k, v, None, False, 0.3)[0]
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, scale=0.3))
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in torch.autograd.grad(out.sum(), (q, k, v)))
