"""Views, in-place edits and mixed arithmetic of a compiled model's DTensors, with the results of one device.

    with torch.no_grad():
        model.embed.weight[3].zero_()             one rank has the row: torch gathers the whole for the view, and would zero that copy
        model.head.weight[mask] = 0               torch refuses a plain mask, and has no rule for parts
        average.lerp_(model.head.weight, 0.1)     torch refuses an average that is a plain tensor

A view along a dim that is not split shares its tensor's memory, and is left alone. A view that torch has gathered is a `GatheredView`: it
is read like any DTensor; a write is made to the whole tensor on every rank, of which each rank keeps its part. So are edits without a
rule in torch, and edits of plain tensors, such as averages of weights from before the model was compiled. It takes the memory of one whole
tensor on each rank meanwhile, and all ranks do it. Plain tensors beside a model's are whole, and the same on all ranks.

torch looks an operator up in a table, `_custom_op_handlers`, before its own rules. Tensors outside a compiled model's mesh go on to these.
"""

from __future__ import annotations

import operator
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from meshc.errors import StateError
from meshc.ir import layouts, trees
from meshc.ir.schemas import written_operands
from meshc.private import OpOverload
from meshc.replacements import replace_for_good
from meshc.runtime.state import random_draws
from meshc.runtime.state.stored_tensor import EDITS

Handler = Callable[..., Any]
"""handler(operator, arguments, keywords) -> result."""

_ATEN: Final = torch.ops.aten

_VIEWS: Final = (
    _ATEN.select.int, _ATEN.slice.Tensor, _ATEN.view.default, _ATEN._reshape_alias.default, _ATEN.diagonal.default, _ATEN.unbind.int,
    _ATEN.split.Tensor, _ATEN.split_with_sizes.default, _ATEN.unfold.default, _ATEN.squeeze.default, _ATEN.squeeze.dim,
    _ATEN.squeeze.dims, _ATEN.expand.default, _ATEN.as_strided.default,
)  # fmt: skip
"""Operators whose result is a view, which torch may gather or refuse; torch views that reorder dims work on parts."""

_BY_ELEMENT: Final = (
    _ATEN.copy_.default, _ATEN.masked_fill_.Scalar, _ATEN.masked_fill_.Tensor, _ATEN.index.Tensor, _ATEN.index_select.default,
)  # fmt: skip
"""Operators that torch runs on parts, and refuses if a value or an index is a plain tensor."""

_ARITHMETIC: Final = tuple(
    operator.attrgetter(name)(_ATEN)
    for name in (
        "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "add_.Tensor", "sub_.Tensor", "mul_.Tensor", "div_.Tensor",
        "lerp.Scalar", "lerp.Tensor", "lerp_.Scalar", "lerp_.Tensor", "addcmul.default", "addcmul_.default", "addcdiv_.default",
        "where.self", "eq.Tensor", "ne.Tensor", "lt.Tensor", "le.Tensor", "gt.Tensor", "ge.Tensor", "maximum.default", "minimum.default",
        "bitwise_and.Tensor", "bitwise_or.Tensor", "_foreach_add.List", "_foreach_sub.List", "_foreach_mul.List", "_foreach_div.List",
        "_foreach_add_.List", "_foreach_sub_.List", "_foreach_mul_.List", "_foreach_div_.List", "_foreach_lerp_.Scalar",
        "_foreach_lerp_.List", "_foreach_lerp_.ScalarList",
    )
)  # fmt: skip
"""Likewise, for arithmetic. On DTensors alone the handler passes them on to torch, at a few us per operator."""

_OF_WHOLES: Final = (
    _ATEN.fill_.Tensor, _ATEN.index_put_.default, _ATEN._index_put_impl_.default, _ATEN.masked_scatter_.default,
    _ATEN.index_fill_.int_Scalar, _ATEN.index_fill_.int_Tensor, _ATEN.index_copy_.default, _ATEN.index_add_.default,
    _ATEN.scatter_.src, _ATEN.scatter_.value, _ATEN.scatter_add_.default, _ATEN.tril_.default, _ATEN.triu_.default, _ATEN.renorm_.default,
)  # fmt: skip
"""Edits for which torch has no rule on parts, or one that takes a part for the whole (`index_copy_` of rows)."""

_EARLIER: Final[dict[OpOverload, Handler]] = {}
"""Torch's own handlers of operators that are handled here."""

_LIVING: Final[weakref.WeakValueDictionary[int, GatheredView]] = weakref.WeakValueDictionary()
"""Gathered views that are alive, by identity."""


_OF_LISTS: Final = tuple(
    getattr(packet, overload)
    for packet in (getattr(_ATEN, name) for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_"))
    for overload in packet.overloads()
    if not overload.endswith("out")
)
"""Edits in place of the tensors of a list, which torch does not count in DTensors."""


def follow() -> None:
    """Installs the handlers of views and edits of DTensors."""
    by_kind = ((_VIEWS, _view), (_BY_ELEMENT, _by_element), (_ARITHMETIC, _by_element), (_OF_WHOLES, _edit), (_OF_LISTS, _edit_list))
    handlers = {op: handler for ops, handler in by_kind for op in ops}
    for op, handler in (handlers | {_ATEN._foreach_copy_.default: _copy_each}).items():
        register_handler(op, handler)


def register_handler(op: OpOverload, handler: Handler) -> None:
    """Installs a handler of an operator on DTensors."""
    earlier = _handlers().get(op)
    if earlier is not None and earlier is not handler:
        _EARLIER[op] = earlier
    replace_for_good("dtensor_operators", {op: handler})


def _handlers() -> dict[OpOverload, Handler]:
    return cast(dict[OpOverload, Handler], DTensor._op_dispatcher._custom_op_handlers)


def by_torch(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Torch's own result of an operator that is handled here."""
    if op in _EARLIER:
        return _EARLIER[op](op, args, kwargs)
    handlers = _handlers()
    handler = handlers.pop(op, None)
    try:
        return op(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[op] = handler


def is_of_model(value: object) -> bool:
    """Whether the value is a DTensor on a compiled model's mesh; False while it is traced."""
    return isinstance(value, DTensor) and type(value._local_tensor) is Tensor and random_draws.home_of(value.device_mesh) is not None


def is_whole(value: DTensor) -> bool:
    """Whether the DTensor is replicated on every axis."""
    return all(type(one) is Replicate for one in value.placements)


class GatheredView(DTensor):
    """A view that torch has gathered.

    origin   the split tensor of the view
    strides  a meta tensor with the shape, strides and offset of the view in the whole `origin`
    seen     the versions of `origin` that the view shows
    """

    origin: DTensor
    strides: Tensor
    seen: tuple[int, ...]

    def __new__(cls, gathered: DTensor, origin: DTensor, strides: Tensor) -> GatheredView:
        view = cast(GatheredView, super().__new__(cls, gathered._local_tensor, gathered._spec, requires_grad=False))
        view.origin, view.strides, view.seen = origin, strides, (_version(origin),)
        _LIVING[id(view)] = view
        return view

    def __init__(self, *_: object) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, *call: Any, **more: Any) -> Any:
        return _dispatch_view(*call, **more)

    def as_dtensor(self) -> DTensor:
        """The view as a plain DTensor, for reads. Raises StateError if `origin` was written since."""
        if _version(self.origin) not in self.seen:
            raise StateError(
                f"a view of shape {list(self.shape)} was taken of a split tensor that has been written since, and shows what was there\n"
                "  why: the tensor lies in parts on several ranks, of which a view is gathered when it is taken\n"
                "  what to do: take the view again where it is read (weight[3] once more); for what was there, .clone() where it is taken"
            )
        return DTensor(self._local_tensor, self._spec, requires_grad=False)

    def show(self, whole: Tensor, seen: tuple[int, ...]) -> None:
        """Takes the values of the whole `origin` at these versions."""
        self._local_tensor, self.seen = _part(self.view_of_whole(whole), self).clone(), seen

    def view_of_whole(self, whole: Tensor) -> Tensor:
        """The view of `whole`, the contiguous whole of `origin`."""
        flat = whole.view(-1)
        typed = flat if flat.dtype == self.strides.dtype else flat.view(self.strides.dtype)
        return typed.as_strided(self.strides.shape, self.strides.stride(), int(self.strides.storage_offset()))

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        self.as_dtensor()
        return super().redistribute(*args, **kwargs)

    def to_local(self, *args: Any, **kwargs: Any) -> Tensor:
        self.as_dtensor()
        return super().to_local(*args, **kwargs)

    def _repr(self, **contents: Any) -> str:
        return repr(self.as_dtensor())

    __repr__: Any = _repr

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.as_dtensor().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_dtensor().clone().__reduce_ex__(protocol)


def _dispatch_view(func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """Runs an operator on a gathered view: an edit, a view, or a read."""
    kwargs = kwargs or {}
    if func._schema.is_mutable and any(isinstance(one, GatheredView) for one in written_operands(func, args, kwargs)):
        return _edit_whole(func, args, kwargs)
    found = func(*trees.map_leaves(_as_gathered, args), **trees.map_leaves(_as_gathered, kwargs))
    alias = func._schema.arguments[0].alias_info if func._schema.arguments else None
    if alias is None or alias.is_write or not isinstance(args[0], GatheredView):
        return found
    strides = func(args[0].strides, *args[1:], **kwargs)
    return _each(found, strides, lambda one, like: GatheredView(one, args[0].origin, like))


def _version(value: DTensor) -> int:
    """A version that changes with writes through the DTensor, and with writes of a program to its memory."""
    return sum(one._version for one in (value, value._local_tensor) if not one.is_inference())


def _as_gathered(value: Any) -> Any:
    return value.as_dtensor() if isinstance(value, GatheredView) else value


def _view(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A view by torch's rule; of the gathered tensor if that fails."""
    base = args[0]
    if not is_of_model(base):
        return by_torch(op, args, kwargs)
    strides = None if is_whole(base) else op(torch.empty(base.shape, dtype=base.dtype, device="meta"), *args[1:], **kwargs)
    try:
        found = by_torch(op, args, kwargs)
    except (RuntimeError, NotImplementedError):
        whole = base.redistribute(placements=[Replicate()] * base.device_mesh.ndim)._local_tensor
        found = _each(op(whole, *args[1:], **kwargs), None, lambda one, _: layouts.dtensor_of_whole(one, base.device_mesh))
    if any(type(one) not in (Shard, Replicate) for one in base.placements):
        return found  # of a partial tensor no rank has a part to keep
    return found if strides is None else _each(found, strides, lambda one, like: _mark_gathered(one, base, like))


def _each(found: Any, strides: Any, mark: Callable[[Any, Any], Any]) -> Any:
    """Applies `mark` to the result, or to each of a list of results."""
    if not isinstance(found, list | tuple):
        return mark(found, strides)
    return [mark(one, like) for one, like in zip(found, strides or [None] * len(found), strict=True)]


def _mark_gathered(found: DTensor, origin: DTensor, strides: Tensor) -> DTensor:
    """A result with the kinds of its origin's placements shares its memory; any other was gathered. All ranks decide the same."""
    return found if _kinds(found.placements) == _kinds(origin.placements) else GatheredView(found, origin, strides)


def _kinds(placements: Sequence[Placement]) -> list[type[Placement]]:
    return [type(one) for one in placements]


def _by_element(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """By torch's rule, with plain tensors as replicated ones; a write to a plain tensor is computed on whole tensors."""
    tensors = [one for given in args for one in (given if isinstance(given, list | tuple) else (given,)) if isinstance(one, Tensor)]
    if all(isinstance(one, DTensor) for one in tensors) or not any(map(is_of_model, tensors)):
        return by_torch(op, args, kwargs)
    written = written_operands(op, args, kwargs)
    into_plain = op._schema.is_mutable and not any(isinstance(one, DTensor) for one in written)
    plain = [one for one in tensors if not isinstance(one, DTensor)]
    if op is not _ATEN.copy_.default and torch.is_grad_enabled() and any(one.requires_grad for one in (tensors if into_plain else plain)):
        _refuse_gradient(op, tensors)
    if into_plain:
        _refuse_other_stage(op, tensors)
        if any(one.numel() > 1 for one in written):
            _warn_of_price(op)
        return _edit_whole(op, args, kwargs)
    if isinstance(args[0], list | tuple) and len(args[0]) > 1:
        return _edit_each(op, args, kwargs)
    with _implicit_replication():
        return by_torch(op, args, kwargs)


def _edit_each(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operator of lists, run for one element of the lists at a time."""
    found = [op(*([given[at]] if isinstance(given, list | tuple) else given for given in args), **kwargs) for at in range(len(args[0]))]
    return None if op._schema.is_mutable else [one for row in found for one in row]


def _edit_list(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An edit in place of the tensors of a list, counted in each, as torch counts it in plain ones: `average = model.state_dict()` and
    `_foreach_lerp_` of its values are a change of the model."""
    found = _by_element(op, args, kwargs) if op in _ARITHMETIC else by_torch(op, args, kwargs)
    torch.autograd.graph.increment_version([one for one in args[0] if is_of_model(one) and not one.is_inference()])
    return found


def _copy_each(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """`_foreach_copy_`, for which torch has no rule."""
    if not any(map(is_of_model, [*args[0], *args[1]])):
        by_torch(op, args, kwargs)
        return
    for one, other in zip(args[0], args[1], strict=True):
        one.copy_(other)


def _refuse_gradient(op: OpOverload, tensors: Sequence[Tensor]) -> None:
    shapes = [f"{'a DTensor' if isinstance(one, DTensor) else 'a plain tensor'} of shape {list(one.shape)}" for one in tensors]
    raise StateError(
        f"{op.__name__} of {' and '.join(shapes)}, with gradients\n"
        "  why: the DTensor is made of a compiled model's parameters, which lie on ranks, and a plain tensor has no gradient of that kind\n"
        "  what to do: make it whole before, as in (loss + penalty.full_tensor()).backward(), on every rank; or compute it in the loss\n"
        "  of a TrainStep"
    )


def _refuse_other_stage(op: OpOverload, tensors: Sequence[Tensor]) -> None:
    if any(isinstance(one, DTensor) and one.device_mesh.get_coordinate() is None for one in tensors):
        raise StateError(
            f"{op.__name__} writes to a plain tensor what is made of one that lives on another pipeline stage\n"
            "  why: this rank has nothing of it, and the plain tensor would keep what it was\n"
            "  what to do: make averages and copies of a model's tensors behind meshc.compile, where they live as those do"
        )


def _warn_of_price(op: OpOverload) -> None:
    warnings.warn(
        f"{op.__name__} writes to a plain tensor what is made of a compiled model's: ranks gather it, and each keeps it whole\n"
        "  what to do: make averages and copies of a model's tensors behind meshc.compile, where they lie in parts as those do",
        stacklevel=3,  # who calls the operator
    )


@contextmanager
def _implicit_replication() -> Iterator[None]:
    dispatcher = DTensor._op_dispatcher
    before = dispatcher._allow_implicit_replication
    dispatcher._allow_implicit_replication = True
    try:
        yield
    finally:
        dispatcher._allow_implicit_replication = before


def _edit(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return _edit_whole(op, args, kwargs) if is_of_model(args[0]) else by_torch(op, args, kwargs)


def _edit_whole(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs an edit on whole tensors, the same on every rank; each rank keeps its part."""
    written = [one for one in written_operands(op, args, kwargs) if isinstance(one, DTensor)]
    if any(one.device_mesh.get_coordinate() is None for one in written):
        return args[0]  # of another pipeline stage
    wholes: dict[int, Tensor] = {}
    given: dict[int, tuple[Tensor, DTensor]] = {}

    def whole(one: Any) -> Any:
        if not isinstance(one, DTensor):
            return one
        origin = _origin(one)
        if id(origin) not in wholes:
            wholes[id(origin)] = DTensor.full_tensor(cast(DTensor, origin.detach())).contiguous()
        full = wholes[id(origin)]
        value = one.view_of_whole(full) if isinstance(one, GatheredView) else full
        given[id(value)] = value, one
        return value

    result = op(*trees.map_leaves(whole, args), **trees.map_leaves(whole, kwargs))
    for origin in {id(one): one for one in map(_origin, written)}.values():
        _keep(origin, wholes[id(origin)], sum(_origin(one) is origin for one in written))
        if torch.Tag.nondeterministic_seeded in op.tags:
            random_draws.note_drawn(origin)
    return trees.map_leaves(lambda one: given[id(one)][1] if id(one) in given else one, result)


def _keep(origin: DTensor, whole: Tensor, times: int) -> None:
    """Writes this rank's part of a tensor, and its views. times: increments of its version by torch, if torch counts the edit."""
    origin._local_tensor.copy_(_part(whole, origin))
    EDITS[origin._local_tensor.data_ptr()] += 1
    seen = _version(origin), _version(origin) + times
    for view in [*_LIVING.values()]:
        if view.origin is origin:
            view.show(whole, seen)


def _origin(one: DTensor) -> DTensor:
    return one.origin if isinstance(one, GatheredView) else one


def _part(whole: Tensor, like: DTensor) -> Tensor:
    """This rank's part of `whole`, sharded like `like`."""
    return layouts.dtensor_of_whole(whole, like.device_mesh).redistribute(placements=like.placements)._local_tensor
