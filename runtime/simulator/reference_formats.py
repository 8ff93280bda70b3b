"""Mode in which a model on one device computes products as the precision and sparse lines of a plan say.

Knows nothing of graphs: the operands of each product that torch runs, in forward and in backward, are found by their memory. A product that
reads a weight with a format is one of forward, or of the gradient with the weight; one that reads what such a product of forward read
beside its weight is that of the weight's gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from meshc.ir.formats import BF16, FORMATS, WEIGHT_GRADIENT, WHOLE, Format, Role
from meshc.ir.functions import Keywords
from meshc.ops import quantize as _quantize  # noqa: F401 - registers its operators
from meshc.private import OpOverload, TorchDispatchMode
from meshc.runtime.simulator.reference_masks import ReferenceMasks
from meshc.runtime.state.stored_tensor import memory_of

aten, meshc = torch.ops.aten, torch.ops.meshc

PLAIN: Final = (aten.mm.default, aten.bmm.default)
ADDED: Final = (aten.addmm.default, aten.baddbmm.default)
GROUPED: Final = (aten._grouped_mm.default,)
COPIES: Final = (aten._to_copy.default, aten.clone.default)


class FewBits(TorchDispatchMode):
    """`formats`: by the name of a parameter of `module`, the format of its products. `masks`: of its weights."""

    def __init__(self, module: nn.Module, formats: Mapping[str, str], masks: ReferenceMasks | None = None) -> None:
        super().__init__()
        self.masks = masks
        if masks is not None:
            masks.begin()
        parameters = dict(module.named_parameters(remove_duplicate=False))
        self.weights = {memory_of(parameters[name]): formats[name] for name in formats}
        self.read: dict[int, str] = {}
        """By memory, what products of forward read beside their weights, with the format."""
        self.held: list[Tensor] = []
        """Tensors whose memory must not be used again."""

    def __torch_dispatch__(self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Keywords | None = None) -> object:
        if func in PLAIN:
            made = self._product(args[0], args[1])
            return func(*self._mask_weights(args)) if made is None else made
        if func in ADDED:
            made = None if kwargs else self._product(args[1], args[2])
            return func(args[0], *self._mask_weights(args[1:]), **(kwargs or {})) if made is None else args[0] + made
        if func in GROUPED:
            args = (*self._mask_weights(args[:2]), *args[2:])
        made = func(*args, **(kwargs or {}))
        if func in COPIES:
            assert isinstance(made, Tensor)
            for known in (self.weights, self.read):
                if memory_of(args[0]) in known:
                    known[memory_of(made)] = known[memory_of(args[0])]
                    self.held.append(made)
            if self.masks is not None:
                self.masks.follow(args[0], made)
        return made

    def _mask_weights(self, factors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The two factors of a product, weights as far as it reads them."""
        a, b = factors
        if self.masks is None:
            return a, b
        return self.masks.mask_factor(a, -1, _in_backward()), self.masks.mask_factor(b, -2, _in_backward())

    def _product(self, a: Tensor, b: Tensor) -> Tensor | None:
        """The product in the format of the weight that it is about; None if there is none."""
        factors = (a, b)
        weights = [self.weights.get(memory_of(one)) for one in factors]
        backward = _in_backward()
        if weights.count(None) == 1:
            place = 0 if weights[1] is None else 1
            name, other = weights[place], factors[1 - place]
            assert name is not None
            if not backward:
                self.read[memory_of(other)] = name
                self.held.append(other)
            return multiply(*self._mask_weights(factors), name, _roles("weight", place, "gradient" if backward else "activation"))
        values = [self.read.get(memory_of(one)) for one in factors]
        if backward and weights == [None, None] and values.count(None) == 1:
            place = 0 if values[1] is None else 1
            name = values[place]
            assert name is not None
            if name != BF16 and WEIGHT_GRADIENT in FORMATS[name].high:
                return None
            return multiply(a, b, name, _roles("activation", place, "gradient"))
        return None


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()


def _roles(role: Role, place: int, other: Role) -> tuple[Role, Role]:
    return (role, other) if place == 0 else (other, role)


def multiply(a: Tensor, b: Tensor, name: str, roles: tuple[Role, Role]) -> Tensor:
    """a [.., m, k] times b [.., k, n] in a format, each operand rounded and brought back."""
    if name == BF16:
        return (a.to(torch.bfloat16) @ b.to(torch.bfloat16)).to(a.dtype)
    form = FORMATS[name]
    computed = torch.float64 if a.dtype == torch.float64 else torch.float32
    return (round_operand(a, form, roles[0], -1, computed) @ round_operand(b, form, roles[1], -2, computed)).to(a.dtype)


def round_operand(x: Tensor, form: Format, role: Role, summed: int, dtype: torch.dtype) -> Tensor:
    """An operand's values after rounding, whose dim `summed` (-1 or -2) is summed over."""
    element = form.gradient if role == "gradient" else form.element
    per = {summed % x.dim(): form.along, (-3 - summed) % x.dim(): form.across[role]}
    blocks = x
    for dim in sorted(per, reverse=True):
        size = x.shape[dim]
        count = size if per[dim] == WHOLE else per[dim]
        blocks = blocks.unflatten(dim, (size // count, count))
    inner = [dim + 1 + number for number, dim in enumerate(sorted(per))]
    scale = meshc.scale_of(blocks, inner, element, form.rounded)
    if form.two:
        scale = meshc.scale_in_units(scale, meshc.scale_of(blocks, list(range(blocks.dim())), element, ""))
    return meshc.dequantize(meshc.quantize(blocks, scale, element), scale, dtype).reshape(x.shape)
