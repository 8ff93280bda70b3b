"""What a mask that is a tensor hides from whole blocks of queries is not computed, and what comes out is what it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from meshc.ops.attention import _backward_kernel, _empty, _kernel, _zeros_like, attention, attention_backward
from meshc.ops.attention_join import attention_merge
from meshc.ops.attention_masked_blocks import backward, forward, visible_blocks

ROWS, HEADS, LONG, SIZE, SCALE = 3, 2, 600, 4, 0.5


def at() -> tuple[Tensor, Tensor]:
    return torch.arange(LONG).unsqueeze(1), torch.arange(LONG)


def documents(*lengths: int) -> Tensor:
    """[queries, keys]: each sees those of its document up to its own."""
    queries, keys = at()
    of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return (of.unsqueeze(1) == of) & (keys <= queries)


def uneven_documents() -> Tensor:
    rows = [documents(200, 17, 383), documents(600), documents(*[40] * 15)]
    return torch.stack(rows).unsqueeze(1)


def padded(side: str) -> Tensor:
    """[rows, 1, queries, keys] of a batch that is padded: causal, and keys that are no padding. Padding sees nothing on the left."""
    queries, keys = at()
    lengths = torch.tensor([100, 600, 313])[:, None, None]
    real = keys >= LONG - lengths if side == "left" else keys < lengths
    return ((keys <= queries) & real).unsqueeze(1)


def prefix() -> Tensor:
    queries, keys = at()
    return ((keys <= queries) | (keys < 150))[None, None]


def by_keys_alone() -> Tensor:
    return (torch.arange(LONG) < torch.tensor([100, 600, 313])[:, None])[:, None, None]


def by_head() -> Tensor:
    return torch.stack([documents(300, 300), documents(150, 450)]).unsqueeze(0)


def scattered() -> Tensor:
    """Blocks that lie far apart, and rows that see nothing."""
    seen = torch.zeros(1, 1, LONG, LONG, dtype=torch.bool)
    seen[:, :, :130, :20] = seen[:, :, :130, 300:310] = seen[:, :, 400:, 590:] = True
    return seen


MASKS: dict[str, Callable[[], Tensor]] = {
    "documents": lambda: documents(250, 350)[None, None], "uneven": uneven_documents, "left": partial(padded, "left"),
    "right": partial(padded, "right"), "prefix": prefix, "keys": by_keys_alone, "heads": by_head, "scattered": scattered,
}  # fmt: skip


def added(seen: Tensor, never: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """What is added to scores, with something of its own where keys are seen."""
    torch.manual_seed(1)
    return torch.randn(seen.shape).to(dtype).masked_fill_(~seen, never)


def operands(count: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(ROWS, HEADS, LONG, SIZE).to(dtype) for _ in range(count)]


def written_out(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Zeros for a query that sees nothing."""
    scores = torch.matmul(q, k.transpose(2, 3)) * SCALE + bias
    dark = scores.amax(-1, keepdim=True) == -math.inf
    return torch.matmul(torch.softmax(scores.masked_fill(dark, 0.0), -1).masked_fill(dark, 0.0), v)


def wanted_of(bias: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output, and gradients of queries, keys and values."""
    q, k, v, grad = operands()
    tensors = [x.requires_grad_() for x in (q, k, v)]
    out = written_out(*tensors, bias)
    return out.detach(), torch.autograd.grad(out, tensors, grad)


@pytest.mark.parametrize("never", [-math.inf, torch.finfo(torch.float32).min], ids=["infinity", "least"])
@pytest.mark.parametrize("mask", MASKS)
def test_it_is_attention_with_all_scores(mask: str, never: float) -> None:
    bias = added(MASKS[mask](), never)
    q, k, v, grad = operands()
    out, lse = attention(q, k, v, bias, False, SCALE)
    wanted, gradients = wanted_of(bias)
    torch.testing.assert_close(out, wanted)
    if never == -math.inf or mask not in ("left", "scattered"):  # the kernel's sums are too coarse for queries whose scores are all lowered
        torch.testing.assert_close(attention_backward(grad, q, k, v, bias, out, lse, False, SCALE), gradients)


@pytest.mark.parametrize(
    "mask,share",
    [("documents", 0.45), ("uneven", 0.5), ("left", 0.35), ("right", 0.6), ("prefix", 0.75), ("keys", 0.57), ("scattered", 0.3)],
)
def test_most_of_what_is_hidden_is_not_computed(mask: str, share: float) -> None:
    """Both ways, by the sizes that the kernel is called with."""
    bias = added(MASKS[mask](), -math.inf)
    q, k, v, grad = operands()
    scores = [0, 0]

    def counted(*given: Tensor) -> tuple[Tensor, Tensor]:
        scores[0] += given[0].shape[0] * given[0].shape[2] * given[1].shape[2]
        return _kernel(SCALE, *given)

    def counted_back(*given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores[1] += given[1].shape[0] * given[1].shape[2] * given[2].shape[2]
        return _backward_kernel(SCALE, *given)

    out, lse = forward(counted, q, k, v, bias, partial(_empty, q, v))
    backward(counted_back, grad, q, k, v, bias, out, lse, _zeros_like)
    assert scores[0] == scores[1] and 0 < scores[0] < share * ROWS * LONG * LONG


def test_results_lie_as_they_lay_and_rows_of_the_batch_that_see_alike_go_together() -> None:
    q, k, v, grad = operands(dtype=torch.bfloat16)
    whole, hidden = (
        added(seen, -math.inf, torch.bfloat16) for seen in (torch.ones(1, 1, LONG, LONG).bool(), documents(250, 350)[None, None])
    )
    assert visible_blocks(whole, ROWS, LONG, LONG) is None
    parts = visible_blocks(hidden, ROWS, LONG, LONG)
    assert parts and all(one.batch == slice(0, ROWS) for one in parts)
    (out, lse), (dense, sums) = (attention(q, k, v, bias, False, SCALE) for bias in (hidden, whole))
    assert (out.stride(), lse.stride(), out.dtype, lse.dtype) == (dense.stride(), sums.stride(), dense.dtype, sums.dtype)
    back, backs = (attention_backward(grad, q, k, v, bias, out, lse, False, SCALE) for bias in (hidden, whole))
    assert [x.stride() for x in back] == [x.stride() for x in backs]


def test_each_query_is_in_one_part_and_those_that_see_the_same_are_together() -> None:
    parts = visible_blocks(added(by_keys_alone(), -math.inf), ROWS, LONG, LONG)
    assert [(one.batch.start, one.rows.stop, one.keys.stop) for one in parts or ()] == [(0, LONG, 100), (1, LONG, 600), (2, LONG, 313)]
    for mask in MASKS.values():
        times = torch.zeros(ROWS, LONG)
        for one in visible_blocks(added(mask(), -math.inf), ROWS, LONG, LONG) or ():
            times[one.batch, one.rows] += 1
        assert not times.any() or bool((times == 1).all())


def test_a_score_that_is_no_number_is_seen() -> None:
    bias = added(documents(300, 300)[None, None], -math.inf)
    bias[0, 0, 10, 550] = math.nan
    q, k, v, _ = operands()
    out, _ = attention(q, k, v, bias, False, SCALE)
    assert bool(out[:, :, 10].isnan().all()) and not bool(out[:, :, 11].isnan().any())


@pytest.mark.parametrize("mask", ["documents", "uneven", "left", "scattered"])
def test_blocks_of_a_ring_that_show_nothing_are_passed_over(mask: str) -> None:
    """Joined, two blocks of keys are attention to all of them."""
    bias, half = added(MASKS[mask](), -math.inf), LONG // 2
    q, k, v, grad = operands()
    blocks = [(k[:, :, keys], v[:, :, keys], bias[..., keys]) for keys in (slice(0, half), slice(half, LONG))]
    where = [(False, SCALE, 0, 0, 0, first, half) for first in (0, half)]
    parts = [attention(q, *block, *how) for block, how in zip(blocks, where, strict=True)]
    out, lse = attention_merge(*parts[0], *parts[1])
    wanted, gradients = wanted_of(bias)
    torch.testing.assert_close(out, wanted)
    given = [attention_backward(grad, q, *block, out, lse, *how) for block, how in zip(blocks, where, strict=True)]
    found = given[0][0] + given[1][0], torch.cat([x[1] for x in given], 2), torch.cat([x[2] for x in given], 2)
    torch.testing.assert_close(found, gradients)
