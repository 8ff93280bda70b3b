"""Gradients of a model on one device, in parts of the batch, and what compress lines of a plan make of them.

Knows nothing of graphs: each product that torch runs in backward is kept by the memory of its result, and when a parameter gets a gradient
of that memory, the product is done again for each part. Sums of gradients, casts and changes of layout are followed likewise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from meshc.errors import VerifyError
from meshc.ir.formats import COMPRESSED, ELEMENTS, SIGN
from meshc.ir.functions import Keywords
from meshc.optimizer.spec import PART_ERRORS, SUM_ERROR
from meshc.private import OpOverload, TorchDispatchMode
from meshc.runtime.state.stored_tensor import memory_of

aten = torch.ops.aten

BLOCK: Final = 256
PRODUCTS: Final = (aten.mm.default, aten.addmm.default)
EACH: Final = (aten.add.Tensor, aten.add_.Tensor, aten._to_copy.default, aten.clone.default)


class GradientRows(TorchDispatchMode):
    """`sizes`: by the number of rows that a product sums over, how these are cut: [lead, parts, rest]."""

    def __init__(self, sizes: Mapping[int, tuple[int, int, int]]) -> None:
        super().__init__()
        self.sizes = sizes
        self.parts: dict[int, list[Tensor]] = {}
        """By memory, the parts of a value, each with the value's strides."""
        self.held: list[Tensor] = []
        """Tensors whose memory must not be used again."""

    def __torch_dispatch__(self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Keywords | None = None) -> object:
        made = func(*args, **(kwargs or {}))
        if torch._C._current_graph_task_id() == -1 or not isinstance(made, Tensor):
            return made
        if func is aten.mm.default and args[0].shape[1] in self.sizes:
            lead, parts, rest = self.sizes[args[0].shape[1]]
            a, b = args[0].unflatten(1, (lead, parts, rest)), args[1].unflatten(0, (lead, parts, rest))
            self._keep(made, [torch.einsum("mlr,lrn->mn", a[:, :, part], b[:, part]) for part in range(parts)])
        elif func in EACH:
            known = [self.of(one) if isinstance(one, Tensor) else one for one in args]
            rows = [one for one in known if isinstance(one, list)]
            self.parts.pop(memory_of(made), None)
            if rows and None not in known:
                pure = aten.add.Tensor if func is aten.add_.Tensor else func
                each = zip(*(one if isinstance(one, list) else [one] * len(rows[0]) for one in known), strict=True)
                self._keep(made, [pure(*values, **(kwargs or {})) for values in each])
        return made

    def _keep(self, made: Tensor, parts: Sequence[Tensor]) -> None:
        self.held.append(made)
        self.parts[memory_of(made)] = [torch.empty_strided(made.shape, made.stride(), dtype=made.dtype).copy_(part) for part in parts]

    def of(self, value: Tensor) -> list[Tensor] | None:
        """The parts of a value that is a view of one with parts."""
        found = self.parts.get(memory_of(value))
        if found is None:
            return None
        return [one.as_strided(value.shape, value.stride(), value.storage_offset()) for one in found]


class CompressedGradients:
    """
    formats  by parameter, the format of its gradient
    rows     by parameter, how rows of the products that its gradient is a sum of are cut
    errors   by the name of a state, its value, from the first step on
    """

    def __init__(self, formats: Mapping[str, str], rows: Mapping[str, Sequence[tuple[int, int, int]]]) -> None:
        self.formats, self.rows = formats, rows
        self.errors: dict[str, Tensor] = {}
        self._parts: dict[str, list[Tensor]] = {}

    @contextmanager
    def watch(self, module: nn.Module) -> Iterator[None]:
        """A context for one backward, in which parts of gradients are found."""
        mode = GradientRows(_by_rows(cut for row in self.rows.values() for cut in row))
        self._parts.clear()

        def note(name: str, gradient: Tensor) -> None:
            if (found := mode.of(gradient)) is not None:
                self._parts[name] = [one.clone() for one in found]

        with ExitStack() as stack:
            for name, parameter in module.named_parameters():
                if name in self.formats:
                    handle = parameter.register_hook(lambda gradient, name=name: note(name, gradient))
                    stack.callback(handle.remove)
            stack.enter_context(mode)
            yield

    def replace_gradients(self, module: nn.Module) -> None:
        """Replaces gradients by what is left of them behind compression, and keeps the errors."""
        for name, parameter in module.named_parameters():
            if name not in self.formats or parameter.grad is None:
                continue
            if name not in self._parts:
                raise VerifyError(f"{name}: on one device no product was found that makes its gradient, so its parts are not known")
            parts = torch.stack(self._parts[name])
            computed = parts.to(torch.float64 if parts.dtype == torch.float64 else torch.float32)
            wanted = computed + self._error(f"{name}/{PART_ERRORS}", computed)
            sent = torch.stack([round_gradient(part, self.formats[name]) for part in wanted])
            total = sent.sum(0)
            total = total + self._error(f"{name}/{SUM_ERROR}", total)
            back = round_gradient(total, self.formats[name])
            self.errors |= {f"{name}/{PART_ERRORS}": wanted - sent, f"{name}/{SUM_ERROR}": total - back}
            parameter.grad = back.to(parameter.dtype)

    def _error(self, name: str, like: Tensor) -> Tensor:
        return self.errors.get(name, torch.zeros_like(like))


def _by_rows(cuts: Iterable[tuple[int, int, int]]) -> dict[int, tuple[int, int, int]]:
    """Cuts by the number of rows of a product, and by those of one of the steps that torch may run in its place; numbers that two cuts have
    are left out."""
    found: dict[int, set[tuple[int, int, int]]] = defaultdict(set)
    for lead, parts, rest in cuts:
        found[lead * parts * rest].add((lead, parts, rest))
        found[parts * rest].add((1, parts, rest))
    return {rows: one for rows, (one, *others) in found.items() if not others}


def round_gradient(value: Tensor, format: str) -> Tensor:
    """A gradient, or one part of it, as it is behind its way (docs/compressed-gradients.md)."""
    if format == SIGN:
        return torch.where(value >= 0, 1.0, -1.0).to(value.dtype) * value.abs().mean()
    element = ELEMENTS[COMPRESSED[format]]
    found = []
    for block in value.split(BLOCK, -1):
        peak = block.abs().amax(-1, keepdim=True).to(torch.float32).to(value.dtype)
        scaled = torch.where(peak > 0, block * (element.largest / peak), 0.0).clamp(-element.largest, element.largest)
        rounded = scaled.round() if format == "int8" else scaled.to(element.dtype).to(value.dtype)
        found.append(rounded * (peak / element.largest))
    return torch.cat(found, -1)
