"""Binding of arguments to torch's own signatures, whether passed by position or by name.

    rand(4, 6, dtype=d), rand(size=(4, 6), dtype=d)                  {"size": (4, 6), "dtype": d}
    scaled_dot_product_attention(query=q, key=k, value=v)            {"query": q, "key": k, "value": v}

Functions written in Python have a signature; for others it comes from the schemas of their operators, one per overload, as in torch's own
argument parser: `self` is called `input`, a size may be passed as separate numbers, and some names have numpy's as alias.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.operator_schemas import get_signature_for_torch_op

from meshc.ir.functions import Function, Target

NUMPYS: Final = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}
"""numpy's parameter name -> torch's, as torch accepts them."""
REQUIRED: Final = inspect.Parameter.empty

Named: TypeAlias = dict[str, Any]
"""Arguments by name, in the order of a signature."""
Placed: TypeAlias = tuple[tuple[Any, ...], Named]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a signature. `kind`: its type as the schema names it, "" if unknown."""

    name: str
    default: object = REQUIRED
    keyword_only: bool = False
    kind: str = ""


Signature: TypeAlias = tuple[Parameter, ...]


def bind_arguments(target: Target, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Named:
    """The arguments of a call by torch's names, without defaults. `target`: a torch function, an operator, or the name of a method; values
    may be nodes of a graph. Raises TypeError where torch would."""
    return _match_overload(target, args, kwargs)[1]


def bind_with_defaults(target: Target, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Named:
    """The arguments of a call by torch's names, with torch's defaults for omitted ones."""
    signature, given = _match_overload(target, args, kwargs)
    return {p.name: given.get(p.name, p.default) for p in signature if p.name in given or p.default is not REQUIRED}


def arguments_for(
    function: Function, target: Target, args: Sequence[Any], kwargs: Mapping[str, Any], without: Collection[str] = ()
) -> Placed:
    """(args, kwargs) to call `function`, whose parameters have torch's names, as `target` was called: by position up to the first omitted;
    all by position if it has `*args`. `without`: names to leave out."""
    parameters = inspect.signature(function).parameters.values()
    whatever = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    named = {
        name: value
        for name, value in (bind_with_defaults if whatever else bind_arguments)(target, args, kwargs).items()
        if name not in without
    }
    if whatever:
        return tuple(named.values()), {}
    first = itertools.takewhile(lambda p: p.kind is p.POSITIONAL_OR_KEYWORD and p.name in named, parameters)
    return tuple(named.pop(p.name) for p in first), named


@cache
def signatures(target: Target) -> tuple[Signature, ...]:
    """The signature of each overload of `target`."""
    if inspect.isfunction(target):
        parameters = inspect.signature(target).parameters.values()
        return (tuple(Parameter(p.name, p.default, p.kind is p.KEYWORD_ONLY) for p in parameters),)
    qualified = getattr(target, "_qualified_op_name", "")  # an operator that a library has registered
    operator: Any = getattr(torch.ops.aten, target) if isinstance(target, str) else target
    if qualified:
        namespace, _, name = qualified.partition("::")
        operator = getattr(getattr(torch.ops, namespace), name)
    _, schemas = get_signature_for_torch_op(operator, return_schemas=True)
    return tuple(tuple(_parameters(schema)) for schema in schemas or ())


def _parameters(schema: Any) -> Iterator[Parameter]:
    for argument in schema.arguments:
        default = argument.default_value if argument.has_default_value() else REQUIRED
        yield Parameter("input" if argument.name == "self" else argument.name, default, argument.kwarg_only, str(argument.type))
    if any(argument.name == "pin_memory" for argument in schema.arguments):  # a factory function
        yield Parameter("requires_grad", False, True, "bool")


def _match_overload(target: Target, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Signature, Named]:
    """(signature, arguments) of the first overload that accepts a call; types decide if number and names fit several."""
    pairs = [(signature, given) for signature in signatures(target) if (given := _bind_to_overload(signature, args, kwargs)) is not None]

    def fits(pair: tuple[Signature, Named], numbers: bool) -> bool:
        return all(_fits(p, pair[1][p.name], numbers) for p in pair[0] if p.name in pair[1])

    fitting = pairs if len(pairs) < 2 else [pair for numbers in (False, True) for pair in pairs if fits(pair, numbers)]
    if not fitting:
        raise TypeError(f"{getattr(target, '__name__', target)}() takes no {len(args)} arguments and {', '.join(kwargs) or 'no names'}")
    return fitting[0]


def _bind_to_overload(signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Named | None:
    """The arguments of a call by parameter name; None if the overload does not accept their number or names."""
    by_place = [p for p in signature if not p.keyword_only]
    if args and [p.kind for p in by_place] == ["List[int]"] and not isinstance(args[0], list | tuple):
        args = [list(args)]
    names = [p.name for p in signature]
    named = {name if name in names else NUMPYS.get(name, name): value for name, value in kwargs.items()}
    given = {**dict(zip([p.name for p in by_place], args, strict=False)), **named}
    taken = len(args) <= len(by_place) and len(given) == len(args) + len(kwargs) and set(given) <= set(names)
    if not taken or any(p.default is REQUIRED and p.name not in given for p in signature):
        return None
    return {name: given[name] for name in names if name in given}


def _fits(parameter: Parameter, value: Any, numbers: bool) -> bool:
    """Whether a parameter accepts `value` by type: a tensor, a sequence, or a scalar. `numbers`: also a scalar in the place of a tensor, as
    in `torch.add(1, x, alpha=2)`."""
    kind = parameter.kind.removeprefix("Optional[")
    value = value.meta.get("example_value", value.meta.get("val")) if isinstance(value, Node) else value
    if value is None:
        return parameter.kind.startswith("Optional[")
    if kind.startswith("List["):
        return isinstance(value, list | tuple)
    tensor = isinstance(value, Tensor) or numbers and isinstance(value, int | float) and kind.startswith("Tensor")
    return tensor == kind.startswith("Tensor") and not isinstance(value, list | tuple)
