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
EACH: Final = (aten.add.Tensor, aten.add_.Tensor, aten._to_copy.default, aten.clone.default)


Cut = tuple[int, int, int]
"""Rows that a product sums over, as [lead, parts, rest]."""
Cuts = tuple[Cut, ...]


class GradientRows(TorchDispatchMode):
    """`cuts`: of the products that some parameter's gradient is a sum of, how rows are cut; of each such tuple parts are kept."""

    def __init__(self, cuts: Iterable[Cuts]) -> None:
        super().__init__()
        self.sizes = {one: _by_rows(one) for one in cuts}
        self.parts: dict[int, dict[Cuts, list[Tensor]]] = {}
        """By memory, the parts of a value, each with the value's strides."""
        self.held: list[Tensor] = []
        """Tensors whose memory must not be used again."""

    def __torch_dispatch__(self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Keywords | None = None) -> object:
        made = func(*args, **(kwargs or {}))
        if torch._C._current_graph_task_id() == -1 or not isinstance(made, Tensor):
            return made
        found = {cuts: parts for cuts in self.sizes if (parts := self._parts(func, args, kwargs or {}, cuts)) is not None}
        if func is aten.mm.default or func in EACH:
            self.held.append(made)
            self.parts[memory_of(made)] = {cuts: [_like(made, part) for part in parts] for cuts, parts in found.items()}
        return made

    def _parts(self, func: OpOverload, args: Sequence[Any], keywords: Keywords, cuts: Cuts) -> list[Tensor] | None:
        """The parts of a call's result; None if it has none."""
        if func is aten.mm.default:
            cut = self.sizes[cuts].get(args[0].shape[1])
            if cut is None:
                return None
            a, b = args[0].unflatten(1, cut), args[1].unflatten(0, cut)
            return [torch.einsum("mlr,lrn->mn", a[:, :, part], b[:, part]) for part in range(cut[1])]
        if func not in EACH:
            return None
        known = [self.of(one, cuts) if isinstance(one, Tensor) else one for one in args]
        rows = [one for one in known if isinstance(one, list)]
        if not rows or None in known:
            return None
        pure = aten.add.Tensor if func is aten.add_.Tensor else func
        each = zip(*(one if isinstance(one, list) else [one] * len(rows[0]) for one in known), strict=True)
        return [pure(*values, **keywords) for values in each]

    def of(self, value: Tensor, cuts: Cuts) -> list[Tensor] | None:
        """The parts of a value that is a view of one with parts."""
        found = self.parts.get(memory_of(value), {}).get(cuts)
        if found is None:
            return None
        return [one.as_strided(value.shape, value.stride(), value.storage_offset()) for one in found]


def _like(made: Tensor, part: Tensor) -> Tensor:
    """A part with the strides of the whole."""
    return torch.empty_strided(made.shape, made.stride(), dtype=made.dtype).copy_(part)


def _by_rows(cuts: Cuts) -> dict[int, Cut]:
    """Cuts by the number of rows of a product, and by those of one of the steps that torch may run in its place; numbers that two cuts have
    are left out."""
    found: dict[int, set[Cut]] = defaultdict(set)
    for lead, parts, rest in cuts:
        found[lead * parts * rest].add((lead, parts, rest))
        found[parts * rest].add((1, parts, rest))
    return {rows: one for rows, (one, *others) in found.items() if not others}


class CompressedGradients:
    """
    formats  by parameter, the format of its gradient
    rows     by parameter, how rows of the products that its gradient is a sum of are cut
    errors   by the name of a state, its value, from the first step on
    """

    def __init__(self, formats: Mapping[str, str], rows: Mapping[str, Iterable[Cut]]) -> None:
        self.formats = formats
        self.rows = {name: tuple(sorted(set(cuts))) for name, cuts in rows.items()}
        self.errors: dict[str, Tensor] = {}
        self._parts: dict[str, list[Tensor]] = {}

    @contextmanager
    def watch(self, module: nn.Module) -> Iterator[None]:
        """A context for one backward, in which parts of gradients are found."""
        mode = GradientRows(dict.fromkeys(self.rows.values()))
        self._parts.clear()

        def note(name: str, gradient: Tensor) -> None:
            if (found := mode.of(gradient, self.rows[name])) is not None:
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
