"""Tape of one expert's forward, as a list of calls, with a proof that each row is computed independently of the others.

    class Expert(nn.Module):                                  linear(x, w1.weight)
        def forward(self, x):                                 silu(0)
            return self.w2(F.silu(self.w1(x)) * self.w3(x))   linear(x, w3.weight) ..

The forward runs once on rows without values. Torch functions are recorded as they are called, and each ATen operator below them must be
one that keeps rows apart: pointwise, a product with a weight, a view or a reduction within a row. When the tape is replayed on the rows of
all experts, a product uses the weight of the expert that a row has chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from meshc.ir.schemas import RESHAPES, arguments_by_name
from meshc.private import TorchDispatchMode, trees_of_torch

aten = torch.ops.aten

ROWS: Final = 7919
"""Rows of the recorded run: a prime, larger than a dim of a model is likely to be."""
ALONG: Final = {
    aten.slice.Tensor, aten.select.int, aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten._softmax.default, aten._log_softmax.default, aten.cat.default, aten.sum.dim_IntList, aten.mean.dim,
    aten.amax.default, aten.amin.default, aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim, aten.any.dim, aten.all.dim,
    aten.cumsum.default, aten.logsumexp.default, aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim, aten.topk.default,
    aten.sort.default, aten.var.correction, aten.std.correction,
}  # fmt: skip
"""Operators that work along their argument `dim`."""
PRODUCTS: Final[Mapping[object, int]] = {
    aten.mm.default: 0, aten.linear.default: 0, aten.addmm.default: 1, aten.mv.default: 0, aten.embedding.default: 1,
    aten.convolution.default: 0,
}  # fmt: skip
"""Operators on rows and on operands shared by all rows -> position of the operand that is rows."""
WITHOUT_SUM: Final = (
    aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default, aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default,
)  # fmt: skip
"""Losses that are pointwise with reduction "none"."""
TOGETHER: Final = (aten.bmm.default, aten.expand.default)
"""Operators that combine equal rows of their operands."""
EACH: Final = (
    aten.clone.default, aten.detach.default, aten._to_copy.default, aten.alias.default, aten.native_dropout.default, aten.bernoulli_.float,
    aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.fill_.Scalar,
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default,
)  # fmt: skip


class NotRows(Exception):
    """Raised where an expert's forward is not known to compute each row independently; the text says why."""


class Name(NamedTuple):
    """A value by name."""

    name: str


class Call(NamedTuple):  # of torch 2.11 Dynamo calls no function that a frozen dataclass holds
    """A call of values."""

    function: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


def map_values(x: Any, change: Callable[[Any], Any]) -> Any:
    """A structure of tuples, lists and slices with `change` applied to each value."""
    if isinstance(x, tuple | list) and not isinstance(x, Name | Call):
        return type(x)([map_values(each, change) for each in x])
    return slice(*[map_values(each, change) for each in (x.start, x.stop, x.step)]) if isinstance(x, slice) else change(x)


def evaluate(value: Any, named: Callable[[str], Any]) -> Any:
    """What a `Name`, a `Call`, or a structure of these is, by the values of names."""

    def change(x: Any) -> Any:
        if isinstance(x, Call):
            return change(x.function)(*evaluate(x.args, named), **dict(evaluate(x.kwargs, named)))
        return named(x.name) if isinstance(x, Name) else x

    return map_values(value, change)


ROW_INPUT: Final = Name("input rows")
"""The input rows of one expert."""


@dataclass(frozen=True)
class Tape:
    """steps    names of results, and calls of them, of `ROW_INPUT` and of parameters by their names, in order
    result   the expert's output
    weights  paths of the parameters that are read
    draws    the forward has active dropout
    writes   the forward changes values in place
    """

    steps: tuple[tuple[Any, Call], ...]
    result: Name
    weights: tuple[tuple[str, ...], ...]
    draws: bool
    writes: bool


def record(expert: nn.Module) -> Tape:
    """The tape of an expert: a module with layers, or one that multiplies by its own parameters. Raises NotRows."""
    widths = dict.fromkeys(each.in_features for each in expert.modules() if isinstance(each, nn.Linear))
    widths = widths or dict.fromkeys(size for each in expert.parameters() for size in reversed(each.shape))
    first: Exception | None = None
    for width in widths:
        try:
            return _record_run(expert, width)
        except NotRows:
            raise
        except Exception as error:  # another width than that of the expert's input
            first = first or error
    raise NotRows(f"it does not run on rows: {first}" if first else "it has no nn.Linear")


def _record_run(expert: nn.Module, width: int) -> Tape:
    for name, each in expert.named_modules():
        if any(getattr(each, hooks) for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")):
            raise NotRows(f"{name or 'it'} has a hook")
    held = {**dict(expert.named_parameters()), **dict(expert.named_buffers())}
    blank = {name: torch.empty(tuple(each.shape), dtype=each.dtype, device="meta") for name, each in held.items()}
    dtype = next(iter(blank.values())).dtype
    noted, proof = _TapeRecorder({id(blank[name]): name for name, _ in expert.named_parameters()}), RowProof()
    with torch.no_grad(), proof:
        rows = torch.empty(ROWS, width, dtype=dtype, device="meta")
        noted.give(rows, ROW_INPUT)
        with noted:
            made = functional_call(expert, blank, (rows,))
    if not isinstance(made, Tensor) or made.dim() != 2 or made.shape[0] != ROWS or id(made) not in noted.names:
        raise NotRows("it gives something else than a row for each row")
    return Tape(tuple(noted.steps), noted.names[id(made)], tuple(dict.fromkeys(noted.read)), proof.draws, proof.writes)


class _TapeRecorder(TorchFunctionMode):
    """Records the torch functions that return tensors."""

    def __init__(self, parameters: Mapping[int, str]) -> None:
        super().__init__()
        self.parameters = parameters
        self.names: dict[int, Name] = {}
        self.kept: list[Tensor] = []
        self.steps: list[tuple[Any, Call]] = []
        self.read: list[tuple[str, ...]] = []

    def give(self, made: Tensor, name: Name | None = None) -> Name:
        self.kept.append(made)  # kept alive, so that no other tensor has its id
        self.names[id(made)] = name or Name(f"value {len(self.kept)}")
        return self.names[id(made)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        found = _tensors(made)
        if not found or getattr(func, "__name__", "") == "__get__":  # a size, a dtype
            if found:
                raise NotRows("it reads an attribute of a tensor that is a tensor")
            return made
        whole = func in (F.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
        given = tuple(self._operand(value, func, whole and place > 0) for place, value in enumerate(args))
        named = tuple((name, self._operand(value, func, whole)) for name, value in (kwargs or {}).items())
        result = [self.give(each) for each in found]
        self.steps.append((result[0] if isinstance(made, Tensor) else result, Call(func, given, named)))
        return made

    def _operand(self, value: object, func: Any, weight: bool) -> object:
        if isinstance(value, Tensor):
            if id(value) in self.names:
                return self.names[id(value)]
            name = self.parameters.get(id(value))
            if name is None or not weight:
                what = f"its parameter {name}" if name else "a tensor of its own"
                raise NotRows(f"{getattr(func, '__name__', func)} reads {what}; weights are those of nn.Linear and F.linear")
            self.read.append(tuple(name.split(".")))
            return Name(name)
        if isinstance(value, list | tuple):
            return tuple(self._operand(each, func, False) for each in value)
        if isinstance(value, int) and not isinstance(value, bool) and value == ROWS:
            if getattr(func, "__name__", "") not in ("view", "reshape"):
                raise NotRows(f"{getattr(func, '__name__', func)} reads how many rows there are")
            return -1
        return value


def _tensors(made: object) -> list[Tensor]:
    return [each for each in trees_of_torch.tree_leaves(made) if isinstance(each, Tensor)]


class RowProof(TorchDispatchMode):
    """Raises NotRows for an operator that may let one row depend on another. Rows are the first dim; `folded`: or the major part of it."""

    draws = writes = False

    def __init__(self, folded: bool = False) -> None:
        super().__init__()
        self.folded = folded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        rows = [each for each in _tensors(args) if self._is_rows(each)]
        if rows:
            self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
            self.writes = self.writes or func._schema.is_mutable
            results = made[:1] if func is aten.nll_loss_forward.default else made  # the second result is the sum of the classes' weights
            if not self._apart(func, args) or not all(self._is_rows(each) for each in _tensors(results)):
                raise NotRows(f"{func} is not known to keep its rows apart")
        return made

    def _is_rows(self, x: Tensor) -> bool:
        return x.dim() > 0 and (x.shape[0] == ROWS or self.folded and x.shape[0] > 0 and x.shape[0] % ROWS == 0)

    def _apart(self, func: Any, args: Sequence[Any]) -> bool:
        are = [isinstance(each, Tensor) and self._is_rows(each) for each in args]
        if torch.Tag.pointwise in func.tags or func in EACH:
            dims = max(each.dim() for each in _tensors(args))
            return all(each.dim() < dims or each.shape[0] == 1 or self._is_rows(each) for each in _tensors(args)) and all(
                each.dim() == dims for each in _tensors(args) if self._is_rows(each)
            )
        if func in PRODUCTS:
            return are[PRODUCTS[func]] and sum(are) == 1
        if func in TOGETHER:
            return are[0] and (are[1] if func is aten.bmm.default else len(args[1]) == args[0].dim())
        if func in WITHOUT_SUM:
            return arguments_by_name(func, args, {})["reduction"] == 0 and all(self._is_rows(each) for each in _tensors(args[:2]))
        if func is aten.permute.default:
            return args[1][0] % args[0].dim() == 0
        if func is aten.transpose.int:
            return all(dim % args[0].dim() != 0 for dim in args[1:])
        if func in RESHAPES:
            return True  # rows in, rows out: a view keeps the first dim major
        if func is aten.constant_pad_nd.default:
            return len(args[1]) < 2 * args[0].dim() or not any(args[1][-2:])  # the last pair is of the first dim
        if func is aten.native_layer_norm.default:
            return len(args[1]) < args[0].dim()
        if func is aten.nll_loss_forward.default:
            return are[0] and are[1] and not any(are[2:]) and args[3] == 0
        if func is aten.gather.default:
            return are[0] and are[2] and args[1] % args[0].dim() != 0
        if func is aten.index.Tensor:
            return are[0] and args[1][0] is None and not any(each is not None and self._is_rows(each) for each in args[1])
        if func in ALONG:
            first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
            said = arguments_by_name(func, args, {})["dim"]
            along: Sequence[int] = said if isinstance(said, list | tuple) else [said]
            return bool(along) and all(dim is not None and dim % (first.dim() + (func is aten.unsqueeze.default)) != 0 for dim in along)
        return False


def play(tape: Tape, rows: Tensor, product: Callable[..., Tensor], weight: Callable[[str], Tensor]) -> Tensor:
    """The expert's output for rows [n, h]. `product(function, *args, **kwargs)` is a call of weights and biases of all experts, stacked."""
    values: dict[str, Any] = {ROW_INPUT.name: rows}

    def value_of(name: str) -> Any:
        return values[name] if name in values else weight(name)

    for result, call in tape.steps:
        weighs = any(isinstance(each, Name) and each.name not in values for each in (*call.args, *(value for _, value in call.kwargs)))
        args, kwargs = evaluate(call.args, value_of), dict(evaluate(call.kwargs, value_of))
        made: Any = product(call.function, *args, **kwargs) if weighs else call.function(*args, **kwargs)
        for name, each in ((result, made),) if isinstance(result, Name) else zip(result, made, strict=True):
            values[name.name] = each
    found: Tensor = values[tape.result.name]
    return found
