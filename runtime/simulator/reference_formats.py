"""Mode in which a model on one device computes products as the precision and sparse lines of a plan say.

Knows nothing of graphs: the operands of each product that torch runs are found by their memory, and which products of backward belong to
one of forward by the number that autograd has given it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from meshc.errors import VerifyError
from meshc.ir.formats import ELEMENTS, WEIGHT_GRADIENT, WHOLE, Format, Role, draw_name
from meshc.ir.functions import Keywords
from meshc.ir.schemas import written_operands
from meshc.ops import expert_groups as _groups  # noqa: F401 - registers its operators
from meshc.ops import grouped_mm as _grouped  # noqa: F401 - likewise
from meshc.ops import quantize as _quantize  # noqa: F401 - likewise
from meshc.ops import routed_mm as _routed  # noqa: F401 - likewise
from meshc.ops.random import seed_step
from meshc.private import OpOverload, TorchDispatchMode
from meshc.runtime.simulator.reference_masks import ReferenceMasks
from meshc.runtime.simulator.reference_scales import DelayedScales
from meshc.runtime.state.stored_tensor import memory_of

aten, meshc = torch.ops.aten, torch.ops.meshc

PLAIN: Final = (aten.mm.default, aten.bmm.default)
ADDED: Final = (aten.addmm.default, aten.baddbmm.default)
RUNS: Final = (aten._grouped_mm.default, meshc.group_mm.default, meshc.grouped_mm.default, meshc.routed_mm.default)
OUTERS: Final = (meshc.grouped_outer.default, meshc.group_outer.default, meshc.routed_outer.default)
COPIES: Final = (aten._to_copy.default, aten.clone.default)
STACKS: Final = (aten.stack.default, aten.cat.default)
Formats = Mapping[str, Sequence[Format | None]]
"""By parameter, the format of each product of forward that reads it and no other one, in their order; None: it stays as it is."""


@dataclass(frozen=True)
class _ForwardProduct:
    """A product of forward: its weight and format, the position of the weight among its factors, and the memory of these."""

    name: str
    form: Format | None
    weight: int
    memory: tuple[int, int]


class FewBits(TorchDispatchMode):
    """`formats`: of products with a parameter of `module`. `scales`: those that are delayed. `masks`: of its weights. `seed`: of a step."""

    def __init__(
        self, module: nn.Module, formats: Formats, scales: DelayedScales | None = None, masks: ReferenceMasks | None = None,
        seed: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.masks, self.formats, self.scales = masks, formats, scales or DelayedScales()
        self.seed = seed_step(0) if seed is None else seed
        if masks is not None:
            masks.begin()
        self.weights: dict[int, tuple[str, ...]] = {}
        """By memory, the parameters that it holds, or that were stacked in it."""
        for name, parameter in module.named_parameters():
            self.weights[memory_of(parameter)] = (name,)
        self.stacks = {name for name, parameter in module.named_parameters() if parameter.dim() > 2}
        self.products: dict[int, _ForwardProduct] = {}
        """Products of forward by autograd's number."""
        self.read: dict[str, list[Tensor]] = {}
        """By parameter, what its products of forward have read beside it."""
        self.rows: dict[int, Format] = {}
        """By memory, the rows of products of runs, with the format."""
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
        if func in OUTERS or func is aten._grouped_mm.default and args[1].dim() == 2:
            return func(*self._outer_factors(args[0], args[1], func is aten._grouped_mm.default), *args[2:], **(kwargs or {}))
        if func in RUNS:
            return func(*self._runs(args[0], args[1]), *args[2:], **(kwargs or {}))
        made = func(*args, **(kwargs or {}))
        for written in written_operands(func, args, kwargs or {}):
            self.weights.pop(memory_of(written), None)
        if func in COPIES:
            self._follow(args[:1], made)
            if self.masks is not None:
                self.masks.follow(args[0], made)
        elif func in STACKS:
            self._follow(args[0], made)
        return made

    def _follow(self, parts: Sequence[Tensor], made: Tensor) -> None:
        """Notes that a tensor is a copy of weights, if all parts of it are."""
        names = [self.weights.get(memory_of(part), ()) for part in parts]
        if all(names):
            self.weights[memory_of(made)] = tuple(name for each in names for name in each)
            self.held.append(made)

    def _mask_weights(self, factors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The two factors of a product, weights as far as it reads them."""
        a, b = factors
        if self.masks is None:
            return a, b
        return self.masks.mask_factor(a, -1, _in_backward()), self.masks.mask_factor(b, -2, _in_backward())

    def _product(self, a: Tensor, b: Tensor) -> Tensor | None:
        """The product in its format; None if it has none."""
        memory = memory_of(a), memory_of(b)
        if _in_backward():
            known = self.products.get(_number_of_backward())
            if known is not None and known.form is not None and known.form.by_row and (rounded := _round_rows(known, a, b)) is not None:
                return torch.matmul(*rounded)
            roles = None if known is None or known.form is None else _roles_in_backward(known, memory)
            return None if roles is None else self._multiply(a, b, known.form, roles, known.name)  # type: ignore[union-attr, arg-type]
        names = [self.weights.get(one, ()) for one in memory]
        if bool(names[0]) == bool(names[1]):
            return None
        place = 0 if names[0] else 1
        self.held += [a, b]
        form = self._next_format(names[place], (b, a)[place])
        if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
            self.products[torch.autograd._get_sequence_nr() - 1] = _ForwardProduct(names[place][0], form, place, memory)
        return None if form is None else self._multiply(a, b, form, _roles("weight", place, "activation"), names[place][0])

    def _multiply(self, a: Tensor, b: Tensor, form: Format, roles: tuple[Role, Role], name: str) -> Tensor:
        """The product that is about a weight, in a format."""
        known = partial(self.scales.scale, form=form, name=name) if form.history else None
        drawn = GradientDraws(draw_name(name, "weight" in roles), self.seed, "weight" in roles) if form.random else None
        return multiply(*self._mask_weights((a, b)), form, roles, known, drawn)

    def _next_format(self, names: Sequence[str], other: Tensor) -> Format | None:
        """The format of a product of forward that reads parameters beside `other`, which has the same as a product that is run again."""
        forms = self.formats.get(names[0], ())
        if not forms:
            return None
        if names[0] in self.stacks and all(form == forms[0] for form in forms):
            return forms[0]  # of a stack there may be a product for each of its matrices
        before = self.read.setdefault(names[0], [])
        if torch._C._current_graph_task_id() == -1:
            number = len(before)
            before.append(other)
        elif all(form == forms[0] for form in forms):
            number = 0
        else:
            number = next((number for number, one in enumerate(before) if one.shape == other.shape and torch.equal(one, other)), len(forms))
        if number >= len(forms):
            raise VerifyError(
                f"a precision line rounds products with {names[0]}, of which the program has {len(forms)}, and the model on one device "
                "runs more (a recurrent layer, say): which of them are rounded cannot be told; program.prove() shows what is computed"
            )
        return forms[number]

    def _runs(self, rows: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
        """The operands of a product of runs of rows with a matrix each, after masks, and rounding where the matrices are weights."""
        names = self.weights.get(memory_of(matrices))
        backward = _in_backward()
        form = None
        if names:
            form = next(iter(self.formats.get(names[0], ())), None) if backward else self._next_format(names, rows)
        rows, matrices = self._mask_weights((rows, matrices))
        if form is None:
            return rows, matrices
        role: Role = "gradient" if backward else "activation"
        if not backward:
            self.rows[memory_of(rows)] = form
            self.held.append(rows)
        return round_operand(rows, form, role, -1, rows.dtype), round_operand(matrices, form, "weight", -2, matrices.dtype)

    def _outer_factors(self, left: Tensor, right: Tensor, turned: bool) -> tuple[Tensor, Tensor]:
        """The factors of the gradient of the matrices of runs: rows that forward has rounded are so. `turned`: left is [k, rows]."""
        forms = [self.rows.get(memory_of(one)) for one in (left, right)]
        summed = (-2 if turned else -1, -1)
        found = [
            one if form is None or not form.by_row else round_operand(one, form, "activation", dim, one.dtype)
            for one, form, dim in zip((left, right), forms, summed, strict=True)
        ]
        return found[0], found[1]


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()


def _number_of_backward() -> int:
    node = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()


def _roles_in_backward(product: _ForwardProduct, memory: Sequence[int]) -> tuple[Role, Role] | None:
    """The roles of the factors of a product of backward; None if it stays as it is."""
    weight, other = product.memory[product.weight], product.memory[1 - product.weight]
    if weight in memory:
        return _roles("weight", memory.index(weight), "gradient")
    if other not in memory or product.form is None or WEIGHT_GRADIENT in product.form.high:
        return None
    return _roles("activation", memory.index(other), "gradient")


def _round_rows(product: _ForwardProduct, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """The factors of the gradient of a weight that is made of rows as forward has rounded them; None for another product."""
    memory = memory_of(a), memory_of(b)
    weight, other = product.memory[product.weight], product.memory[1 - product.weight]
    if weight in memory or other not in memory or product.form is None:
        return None
    if memory.index(other) == 0:
        return round_operand(a, product.form, "activation", -2, a.dtype), b
    return a, round_operand(b, product.form, "activation", -1, b.dtype)


def _roles(role: Role, place: int, other: Role) -> tuple[Role, Role]:
    return (role, other) if place == 0 else (other, role)


Known = Callable[[Tensor, Role], Tensor]
"""The scale of an operand, where it is known before."""


@dataclass(frozen=True)
class GradientDraws:
    """Draws by which a gradient [rows, features] is rounded. `seed`: of the step; `sums_features`: whether its product sums over these."""

    name: str
    seed: Tensor
    sums_features: bool

    def quantize(self, blocks: Tensor, scale: Tensor, element: str) -> Tensor:
        shape = list(blocks.shape)
        made: Tensor = meshc.quantize_by_draw(blocks, scale, element, self.seed, self.name, shape, shape, [0] * len(shape))
        return made


def multiply(
    a: Tensor, b: Tensor, form: Format, roles: tuple[Role, Role], known: Known | None = None, drawn: GradientDraws | None = None
) -> Tensor:
    """a [.., m, k] times b [.., k, n] in a format, each operand rounded and brought back."""
    if not form.is_scaled:
        dtype = ELEMENTS[form.element].dtype
        return (a.to(dtype) @ b.to(dtype)).to(a.dtype)
    computed = torch.float64 if a.dtype == torch.float64 else torch.float32
    rows, columns = (
        round_operand(x, form, role, summed, computed, known, drawn) for x, role, summed in ((a, roles[0], -1), (b, roles[1], -2))
    )
    return (rows @ columns).to(a.dtype)


def round_operand(
    x: Tensor, form: Format, role: Role, summed: int, dtype: torch.dtype, known: Known | None = None, drawn: GradientDraws | None = None
) -> Tensor:
    """An operand's values after rounding, whose dim `summed` (-1 or -2) is summed over."""
    if not form.is_scaled:
        return x.to(ELEMENTS[form.element].dtype).to(dtype)
    draws = drawn if role == "gradient" else None
    if draws is not None and (summed == -2) == draws.sums_features:
        return round_operand(x.t(), form, role, -3 - summed, dtype, known, drawn).t()
    element = form.gradient if role == "gradient" else form.element
    per = {summed % x.dim(): form.along, (-3 - summed) % x.dim(): form.across[role]}
    blocks = x
    for dim in sorted(per, reverse=True):
        size = x.shape[dim]
        count = size if per[dim] == WHOLE else per[dim]
        blocks = blocks.unflatten(dim, (size // count, count))
    inner = [dim + 1 + number for number, dim in enumerate(sorted(per))]
    scale = meshc.scale_of(blocks, inner, element, form.rounded) if known is None else known(blocks, role)
    if form.two:
        scale = meshc.scale_in_units(scale, meshc.scale_of(blocks, list(range(blocks.dim())), element, ""))
    values = meshc.quantize(blocks, scale, element) if draws is None else draws.quantize(blocks, scale, element)
    return meshc.dequantize(values, scale, dtype).reshape(x.shape)
