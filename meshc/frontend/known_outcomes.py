"""Constant folding in a trace: tensor values that no input, parameter or draw decides, and branches on draws that no draw decides.

    for i in torch.arange(1, 3).tolist():              1, 2
    n = int(torch.tensor(x.shape[1:]).prod())          a number
    x.reshape(len(x), np.prod(x.shape[1:]))            a number
    pairs[~torch.eye(n, dtype=torch.bool)]             pairs[rows, columns], which are known
    if torch.rand(1).item() <= self.rate:              False, where the rate is 0.0;  < 1.0 is True
    if torch.jit.isinstance(x, torch.Tensor):          as Python answers it for the traced value

Fake tensors carry the values of tensors built from Python numbers (`torch.tensor(4)`), and of results of these alone, up to one element.
Here the limit is `MOST` elements, and tensors built from sizes and numbers are included. torch itself drops the value of a tensor that is
written with an unknown value. A draw is in [0, 1); an outcome for a draw of exactly 0 is ignored.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from meshc.frontend.in_place_changes import changed_operand, is_changed_later
from meshc.frontend.selected_places import index_of, is_mask, name_of, value_of
from meshc.ops.signatures import bind_arguments
from meshc.replacements import replace_targets

aten = torch.ops.aten

MOST: Final = 1 << 16
"""Most elements of a known value: pairs of 256 rows."""
MADE: Final = frozenset({
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default, aten.logspace.default, aten.zeros.default,
    aten.ones.default, aten.full.default, aten.eye.default, aten.eye.m, aten.scalar_tensor.default, aten.tril_indices.default,
    aten.triu_indices.default,
})  # fmt: skip
"""Operators that build a tensor from sizes and numbers."""
PLACES: Final = "meshc_places"
"""Attribute of a fake tensor indexed by known masks: the indices that the masks select."""
_SIZED_BY_VALUES: Final = r"^(nonzero|argwhere|masked_select|unique\w*|repeat_interleave)$"
"""Calls with results of a size that values decide."""
COMPARES: Final = frozenset({
    *(getattr(aten, name).Scalar for name in ("ne", "eq", "gt", "ge", "lt", "le")),
    *(getattr(aten, name).Tensor for name in ("ne", "eq", "gt", "ge", "lt", "le", "bitwise_and", "bitwise_or")),
    aten.bitwise_not.default, aten.logical_not.default, aten.logical_and.default, aten.logical_or.default, aten.isnan.default,
})  # fmt: skip
"""Operators that compute masks."""
COMPARED: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
SAME: Final = frozenset("item float sym_float reshape view flatten squeeze unsqueeze to cpu detach clone getitem".split())
"""Calls whose result is a draw if their operand is one."""
DRAWS: Final = frozenset("rand rand_like uniform_ random_sample".split())


@contextlib.contextmanager
def known_outcomes() -> Iterator[None]:
    """A context for one trace, in which known values are folded."""
    from meshc.private import FakeTensorMode, variables

    dispatch, as_list, masks = FakeTensorMode.dispatch, variables.TensorVariable.method_tolist, _EqualMasks()

    def dispatch_and_fold(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = _places(args[1]) if func is aten.index.Tensor else {}
        if places:
            args = args[0], [each for at, one in enumerate(args[1]) for each in (map(self.from_tensor, places.get(at, ())) or [one])]
        found, kwargs = dispatch(self, func, types, args, kwargs), kwargs or {}
        if places:
            setattr(found, PLACES, places)
        if func in MADE and isinstance(found, Tensor) and _is_plain(found, (*args, *kwargs.values())):
            _record_constant(self, found, func, args, kwargs)
        if func in COMPARES and isinstance(found, Tensor):
            masks.note(func, args, found)
        return found

    def list_known(self: Any, tx: Any) -> Any:
        value = known_value(self)
        return as_list(self, tx) if value is None else variables.VariableTracker.build(tx, value.tolist())

    with replace_targets(known_elements=MOST, fake_dispatch=dispatch_and_fold, tensor_list=list_known, jit_isinstance=is_of):
        yield


class _EqualMasks:
    """Masks of one trace that are computed by equal calls, and so select equally many elements."""

    def __init__(self) -> None:
        self._first: dict[object, Any] = {}
        self._same: dict[int, int] = {}
        self._held: list[object] = []

    def note(self, func: Any, args: Any, made: Any) -> None:
        self._held.append((args, made))  # kept alive, so that no other tensor has its id
        key = func, *((self._same.get(id(one), id(one)), one._version) if isinstance(one, Tensor) else repr(one) for one in args)
        first = self._first.setdefault(key, made)
        self._same[id(made)] = id(first)
        if first is not made and first.nonzero_memo is not None:
            made.nonzero_memo = first.nonzero_memo


def write_known_values(module: GraphModule) -> None:
    """Replace, in place, nodes of a trace whose size follows from a known value by a constant, or by an index with constants; and
    calls that compute a known number."""
    for node in list(module.graph.nodes):
        if node.target is operator.getitem and (places := getattr(value_of(node), PLACES, None)) is not None:
            _write_places(node, places)
        elif name_of(node) in ("getitem", "setitem") and node.args:
            _index_by_numbers(node)
        elif name_of(node).startswith("wrapped_") and not node.all_input_nodes:
            _scale_by_number(node)
        if not (is_sized_by_values(node) or _is_size(node)) or is_changed_later(node):
            continue
        with module.graph.inserting_before(node):
            value = _constant(node)
            if value is not None:
                made = _literal(node, value)
            elif (taken := _repeated_rows(node)) is not None:
                x, dim, places = taken
                made = module.graph.call_function(torch.index_select, (x, dim, _literal(node, places)))
            else:
                continue
        made.meta = dict(node.meta)
        several = node.args[0] if name_of(node) == "getitem" else None
        node.replace_all_uses_with(made)
        module.graph.erase_node(node)
        if isinstance(several, Node) and not several.users:
            module.graph.erase_node(several)
    module.recompile()


def _places(index: Sequence[Any]) -> dict[int, Sequence[Tensor]]:
    """Indices that the masks of an index select, by the masks' positions in it; {} unless all masks are known. (Masks may be changed later
    on.)"""
    values = {at: getattr(one, "constant", None) for at, one in enumerate(index) if isinstance(one, Tensor) and one.dtype == torch.bool}
    return {at: value.nonzero().unbind(1) for at, value in values.items() if value is not None} if None not in values.values() else {}


def _write_places(node: Node, places: Mapping[int, Sequence[Tensor]]) -> None:
    """Replace the known masks of an index by the indices that each selects."""
    written, masks = list[Any](), iter(places.values())
    with node.graph.inserting_before(node):
        for one in index_of(node):
            written += [_literal(one, each) for each in next(masks)] if is_mask(one) else [one]
    node.args = (node.args[0], tuple(written))


def is_sized_by_values(node: Node) -> bool:
    """Whether a node's result has a size that values decide, or is an item of such a result."""
    if name_of(node) == "getitem" and node.args and isinstance(several := node.args[0], Node):
        return name_of(several) == "where" and len(several.args) == 1 and not several.kwargs or is_sized_by_values(several)
    if node.op not in ("call_function", "call_method") or not re.search(_SIZED_BY_VALUES, name_of(node)):
        return False
    if name_of(node) != "repeat_interleave":
        return True
    return isinstance(value_of(bind_arguments(node.target, node.args, node.kwargs).get("repeats")), Tensor)


def _index_by_numbers(node: Node) -> None:
    """Replace known masks of an index by the indices that each selects, and known numbers by Python numbers."""
    index, numbers = index_of(node), list[Any]()
    for one in index:
        value = _constant(one)
        mask = value is not None and value.dtype == torch.bool
        if not isinstance(one, Node) or value is None or mask != (value.dim() > 0) or is_changed_later(one):
            numbers.append(one)
        elif not mask:
            numbers.append(int(value))
        else:
            with node.graph.inserting_before(node):
                numbers += [_literal(one, places) for places in value.nonzero(as_tuple=True)]
    if len(numbers) != len(index) or any(one is not other for one, other in zip(numbers, index, strict=True)):
        node.args = (node.args[0], tuple(numbers), *node.args[2:])


def _is_size(node: Node) -> bool:
    """Whether a node computes a known whole number on CPU, which may be a size: torch would not know it where it is computed of more
    numbers."""
    calls = node.op in ("call_function", "call_method") and node.target is not torch.tensor and changed_operand(node) is None
    value = _constant(node) if calls and getattr(value_of(node), "device", None) == torch.device("cpu") else None
    return value is not None and value.numel() == 1 and value.dtype in (torch.int64, torch.int32)


def _scale_by_number(node: Node) -> None:
    """A number computed by numpy, a tensor in the trace, becomes a Python number again where torch takes no tensor."""
    target: Any = node.target
    for user in list(node.users):
        for name in [name for name, value in user.kwargs.items() if value is node and name in ("alpha", "beta")]:
            user.update_kwarg(name, float(target(*node.args, **node.kwargs)))


def _constant(node: object) -> Tensor | None:
    value = getattr(value_of(node), "constant", None)
    return value if isinstance(value, Tensor) else None


def _literal(like: Node, value: Tensor) -> Node:
    made = like.graph.call_function(torch.tensor, (value.tolist(),), {"dtype": value.dtype})
    made.meta = {**like.meta, "example_value": like.meta["example_value"].new_empty(value.shape, dtype=value.dtype)}
    return made


def _repeated_rows(node: Node) -> tuple[Node, int, Tensor] | None:
    """The operand, dim and row indices of `repeat_interleave` with known counts; None for any other call."""
    if name_of(node) != "repeat_interleave" or len(node.all_input_nodes) != 2:
        return None
    named = bind_arguments(node.target, node.args, node.kwargs)
    counts, dim = _constant(named.get("repeats")), named.get("dim")
    if counts is None or dim is None or is_changed_later(named["repeats"]) or counts.dim() != 1:
        return None
    return named["input"], dim, torch.repeat_interleave(counts)


def _is_plain(made: Tensor, given: tuple[object, ...]) -> bool:
    """Whether `made` is a small CPU tensor computed from plain numbers, without symbolic sizes."""
    sizes = [one for each in given for one in (each if isinstance(each, list | tuple) else [each])]
    open_ = any(isinstance(one, torch.SymInt | torch.SymFloat | torch.SymBool) for one in sizes)
    return not open_ and made.device.type == "cpu" and made.layout is torch.strided and made.numel() <= MOST


def _record_constant(mode: Any, made: Any, func: Any, args: Any, kwargs: Any) -> None:
    from meshc.private import no_dispatch

    with no_dispatch():
        made.constant = func(*args, **kwargs)
    mode.fake_tensor_converter.add_constant_storage_mapping(made)


def known_value(traced: Any) -> Tensor | None:
    """The value of a traced tensor, if no input decides it."""
    return _constant(traced.as_proxy().node)


def outcome(traced: Any) -> bool | None:
    """The known outcome of a branch on a traced boolean, a one-element tensor or a symbolic number; None if unknown."""
    from meshc.private import variables

    if isinstance(traced, variables.TensorVariable):
        value = known_value(traced)
        if value is not None:
            return bool(value) if value.numel() == 1 else None
    elif not isinstance(traced, variables.SymNodeVariable):
        return None
    asked = traced.as_proxy().node
    compare = COMPARED.get(name_of(asked).strip("_"))
    if compare is None or len(asked.args) != 2 or asked.kwargs:
        return None
    one, other = asked.args
    turned = isinstance(other, Node)
    draw, bound = (other, one) if turned else (one, other)
    if not isinstance(bound, int | float) or not isinstance(draw, Node) or not _is_draw(draw):
        return None
    if 0 < bound < 1:
        return None
    return compare(bound, 0.5) if turned else compare(0.5, bound)


def _is_draw(node: Node) -> bool:
    while name_of(node) in SAME:
        given = node.all_input_nodes[0]
        if len({dtype for one in (node, given) if (dtype := getattr(value_of(one), "dtype", None)) is not None}) > 1:
            return False  # a rounding may reach 0 or 1
        node = given
    return name_of(node) in DRAWS and not (name_of(node) == "uniform_" and (len(node.args) > 1 or node.kwargs))


def is_of(value: object, kind: Any) -> bool:
    """`torch.jit.isinstance`, in Python that can be traced: `List[Tensor]`, `Dict[str, Tensor]`, `Tuple[int, str]`, `Optional[Tensor]`."""
    if isinstance(kind, tuple):
        return any([is_of(value, one) for one in kind])
    origin: Any = getattr(kind, "__origin__", None)
    of: Any = getattr(kind, "__args__", ())
    if origin is None and not of:
        return isinstance(value, kind)
    if origin is list:
        return isinstance(value, list) and all([is_of(one, of[0]) for one in value])
    if origin is dict:
        return isinstance(value, dict) and all([is_of(one, of[0]) and is_of(each, of[1]) for one, each in value.items()])
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(of) and all([is_of(one, each) for one, each in zip(value, of, strict=True)])
    return any([is_of(value, one) for one in of])
