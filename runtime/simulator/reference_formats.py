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

from meshc.ir.formats import ELEMENTS, WEIGHT_GRADIENT, WHOLE, Format, Role
from meshc.ir.functions import Keywords
from meshc.ops import expert_groups as _groups  # noqa: F401 - registers its operators
from meshc.ops import grouped_mm as _grouped  # noqa: F401 - likewise
from meshc.ops import quantize as _quantize  # noqa: F401 - likewise
from meshc.ops import routed_mm as _routed  # noqa: F401 - likewise
from meshc.private import OpOverload, TorchDispatchMode
from meshc.runtime.simulator.reference_masks import ReferenceMasks
from meshc.runtime.state.stored_tensor import memory_of

aten, meshc = torch.ops.aten, torch.ops.meshc

PLAIN: Final = (aten.mm.default, aten.bmm.default)
ADDED: Final = (aten.addmm.default, aten.baddbmm.default)
RUNS: Final = (aten._grouped_mm.default, meshc.group_mm.default, meshc.grouped_mm.default, meshc.routed_mm.default)
COPIES: Final = (aten._to_copy.default, aten.clone.default)


class FewBits(TorchDispatchMode):
    """`formats`: by the name of a parameter of `module`, the format of its products. `masks`: of its weights."""

    def __init__(self, module: nn.Module, formats: Mapping[str, Format], masks: ReferenceMasks | None = None) -> None:
        super().__init__()
        self.masks = masks
        if masks is not None:
            masks.begin()
        parameters = dict(module.named_parameters(remove_duplicate=False))
        self.weights = {memory_of(parameters[name]): formats[name] for name in formats}
        self.read: dict[int, Format] = {}
        """By memory, what products of forward read beside their weights, with the format."""
        self.held: list[Tensor] = []
        """Tensors whose memory must not be used again."""

    def __torch_dispatch__(self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Keywords | None = None) -> object:
        if func in PLAIN:
            made = self._product(args[0], args[1])
            return func(*self._mask_weights(args[:2])) if made is None else made
        if func in ADDED:
            made = self._product(args[1], args[2])
            if made is None:
                return func(args[0], *self._mask_weights(args[1:]), **(kwargs or {}))
            factors: dict[str, Any] = {"beta": 1, "alpha": 1} | dict(kwargs or {})
            return factors["beta"] * args[0] + factors["alpha"] * made
        if func in RUNS:
            return func(*self._runs(args[0], args[1]), *args[2:], **(kwargs or {}))
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
            form, other = weights[place], factors[1 - place]
            assert form is not None
            if not backward:
                self.read[memory_of(other)] = form
                self.held.append(other)
            return multiply(*self._mask_weights(factors), form, _roles("weight", place, "gradient" if backward else "activation"))
        values = [self.read.get(memory_of(one)) for one in factors]
        if backward and weights == [None, None] and values.count(None) == 1:
            place = 0 if values[1] is None else 1
            form = values[place]
            assert form is not None
            return None if WEIGHT_GRADIENT in form.high else multiply(a, b, form, _roles("activation", place, "gradient"))
        return None

    def _runs(self, rows: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
        """The operands of a product of runs of rows with a matrix each, after masks, and rounding where the matrices are weights."""
        form = self.weights.get(memory_of(matrices))
        rows, matrices = self._mask_weights((rows, matrices))
        if form is None:
            return rows, matrices
        role: Role = "gradient" if _in_backward() else "activation"
        return round_operand(rows, form, role, -1, rows.dtype), round_operand(matrices, form, "weight", -2, matrices.dtype)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()


def _roles(role: Role, place: int, other: Role) -> tuple[Role, Role]:
    return (role, other) if place == 0 else (other, role)


def multiply(a: Tensor, b: Tensor, form: Format, roles: tuple[Role, Role]) -> Tensor:
    """a [.., m, k] times b [.., k, n] in a format, each operand rounded and brought back."""
    if not form.is_scaled:
        dtype = ELEMENTS[form.element].dtype
        return (a.to(dtype) @ b.to(dtype)).to(a.dtype)
    computed = torch.float64 if a.dtype == torch.float64 else torch.float32
    return (round_operand(a, form, roles[0], -1, computed) @ round_operand(b, form, roles[1], -2, computed)).to(a.dtype)


def round_operand(x: Tensor, form: Format, role: Role, summed: int, dtype: torch.dtype) -> Tensor:
    """An operand's values after rounding, whose dim `summed` (-1 or -2) is summed over."""
    if not form.is_scaled:
        return x.to(ELEMENTS[form.element].dtype).to(dtype)
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
