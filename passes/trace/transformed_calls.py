"""Calls within torch.func transforms, which stay torch's own: numbered draws below the transform, and attention written out.

    mask = vmap(lambda z: dropout(z, 0.1), randomness="different")(x)       one call, of the draws of all that vmap maps
    grad(lambda z: scaled_dot_product_attention(z, z, z).sum())(x)          matmul, softmax, matmul

Part of `raise_ops`. torch decides what `randomness` means, and draws random numbers below all levels, in the full batched shape. There
the draws are replaced as on one device (`meshc/frontend/reference_random.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshc.errors import CompileError
from meshc.frontend.inner_transforms import below_wrappers
from meshc.frontend.reference_random import ReferenceRandom, Tile
from meshc.frontend.sources import source_of
from meshc.ir.functions import Function, Target
from meshc.ops import recurrent
from meshc.private import OpOverload

ATTENTION: Final[tuple[Target, ...]] = (
    torch.nn.functional.scaled_dot_product_attention, torch.nn.functional.multi_head_attention_forward,
)  # fmt: skip


def draw_below(node: Node, seed_step: Node, call: int, count: int) -> int:
    """Replaces the target by the same call whose draws have `count` numbers from `call` on. Returns how many: torch permutes once for each
    row that vmap maps. Raises CompileError for recurrent layers, whose dropout torch's own operators for traces leave out."""
    if node.target in recurrent.RAISED:
        raise CompileError(
            f"recurrent layers with dropout between them stand within a transform of torch.func\n  in your model: {source_of(node)}\n"
            "  why: torch takes them apart there, and leaves the dropout out\n"
            "  what to do: a layer each (num_layers=1), with nn.Dropout between; or torch.autograd.grad for the gradient"
        )
    if node.target is torch.randperm:
        drawn = node.meta["example_value"]
        count = below_wrappers(drawn).numel() // max(drawn.numel(), 1)
    node.op, node.target = "call_function", _drawing(node.target)
    node.kwargs = {**node.kwargs, "seed_step": seed_step, "numbers": (call, count)}
    return count


def write_out_attention(node: Node) -> None:
    """Replaces the target of an attention that draws nothing by its math form."""
    node.op, node.target = "call_function", _written_out(node.target)


@functools.cache
def _written_out(target: Any) -> Function:
    def written_out(*args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return target(*args, **kwargs)

    written_out.__name__ = target.__name__
    return written_out


@functools.cache
def _drawing(target: Target) -> Function:
    def drawing(*args: Any, seed_step: Tensor, numbers: tuple[int, int], **kwargs: Any) -> Any:
        function, rest = (getattr(args[0], target), args[1:]) if isinstance(target, str) else (target, args)
        calls = iter(range(numbers[0], sum(numbers)))
        with sdpa_kernel(SDPBackend.MATH), _CallDraws(seed_step, calls):
            drawn = function(*rest, **kwargs)
        assert next(calls, None) is None, "it draws less than torch does outside of a trace"
        return drawn

    drawing.__name__ = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return drawing


class _CallDraws(ReferenceRandom):
    """Replaces the draws of one traced call by numbered ones."""

    def __init__(self, seed_step: Tensor, numbers: Iterator[int]) -> None:
        super().__init__(0)
        self.seed_step, self.numbers = seed_step, numbers

    def next(self, func: OpOverload, shape: Sequence[int], device: torch.device | None) -> tuple[Tensor, int, Tile]:
        return self.seed_step, next(self.numbers), (tuple(shape), tuple(shape), [0] * len(shape))
