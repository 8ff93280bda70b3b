"""`operator`: registers a function as an operator of meshc; the check of its operands, its results' shapes and its gradient are said once.

    @operator("to_groups", "x [q, t, m, h]", "x [t, h], own:integer [q, t, m]", rule="rows [t, h] have choices [q, t, m]")
    def to_groups(x: Tensor, own: Tensor) -> Tensor:

Operands in a text have the sizes in brackets, a name always the same one, `..` any number of them; behind a colon stands their dtype, or
another operand, whose dtype they have; `each >= 1` bounds a number or a size. Results are like an operand, of its sizes and dtype unless
others are said. Functions in the place of texts are called with those of the operator's arguments, by name, that they have parameters for,
`operator`, its name, and the sizes of its operands.

The check runs before real and fake calls alike: kernels index memory by the sizes of one operand and would read or write past the end of
another. So every operator compares sizes first; values are checked only where a kernel relies on them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from meshc.ir.functions import Function
from meshc.private import OpOverload

Named = Mapping[str, Any]
"""Arguments and sizes by name."""

PLAIN: Final[dict[OpOverload, Function]] = {}
"""Operator -> its function, with the check, for calls on plain tensors."""

DTYPES: Final = {
    "integer": (torch.int64, torch.int32), "int64": (torch.int64,), "float": (torch.float32, torch.float64), "bool": (torch.bool,),
}  # fmt: skip
"""Dtypes by their name in the text of operands, the first one for results."""

ops: Final = torch.ops.meshc
_LIBRARY: Final = torch.library.Library("meshc", "FRAGMENT")
_OPERAND: Final = re.compile(r"(\w+)(?::(\w+))?(?: \[(.*?)\])?(?: >= (\d+))?")


def operator(
    name: str, results: str | Function, fit: str | Function | None = None, *, rule: str = "", where: Function | None = None,
    gradient: Function | None = None, schema: str | None = None,
) -> Callable[[Function], torch.library.CustomOpDef]:  # fmt: skip
    """A decorator that registers `meshc::name`.

    results   "x [t, h], own": the results, empty; or a function to them
    fit       "x [t, h], each >= 1": the operands that fit together; or a function that raises for others
    rule      with a text, what the error says of others, a format of the arguments
    where     with a text, what must hold beside it
    gradient  the first operand's, of the first result's, and by name arguments, results that the schema names, and the operand's `shape`
    schema    where the function's own annotations do not say it
    """

    def register(function: Function) -> torch.library.CustomOpDef:
        parameters = inspect.signature(function).parameters
        known = {"operator": name} | {one.name: one.default for one in parameters.values() if one.default is not one.empty}
        check = _check_sizes(fit, rule, where) if isinstance(fit, str) else by_name(fit or (lambda: None))
        empty = _empty_results(results) if isinstance(results, str) else by_name(results)

        def bind(args: tuple[Any, ...], kwargs: Named) -> Named:
            return known | dict(zip(parameters, args, strict=False), **kwargs)

        def check_and_call(*args: Any, **kwargs: Any) -> Any:
            check(bind(args, kwargs))
            return function(*args, **kwargs)

        def fake(*args: Any, **kwargs: Any) -> Any:
            given = bind(args, kwargs)
            return empty({**given, **(check(given) or {})})

        called = function if fit is None else check_and_call
        said = schema or torch.library.infer_schema(function, mutates_args=())
        made = define(name, said, called, fake)
        if gradient is not None:
            _register_gradient(made, gradient, [*parameters])
        return made

    return register


def define(name: str, schema: str, function: Function, fake: Function) -> torch.library.CustomOpDef:
    """Registers `meshc::name` of a function that checks its operands, and `fake`, which does so on fake tensors."""
    made = torch.library.custom_op(f"meshc::{name}", function, mutates_args=(), schema=schema)
    made.register_fake(fake)
    PLAIN[made._opoverload] = function
    return made


def by_name(function: Function) -> Callable[[Named], Any]:
    """`function`, of the arguments among those given that it has parameters for."""
    names = [*inspect.signature(function).parameters]
    return lambda given: function(**{name: given[name] for name in names if name in given})


def _check_sizes(fit: str, rule: str, where: Function | None) -> Callable[[Named], Named]:
    """The function from arguments to the sizes of operands, which raises for those that do not fit."""
    operands, holds = _parse(fit), None if where is None else by_name(where)

    def check(given: Named) -> Named:
        sizes = _sizes_of(operands, given)
        if sizes is None or holds is not None and not holds({**given, **sizes}):
            tensors = {name: given[name] for name, *_ in operands if isinstance(given.get(name), Tensor)}
            raise misfit(given["operator"], rule.format(**given), **tensors)
        return sizes

    return check


def _parse(text: str) -> list[tuple[str, str, list[str], int | None]]:
    """(name, dtype, sizes, least value) of each operand, number or result."""
    found = _OPERAND.findall(text)
    return [(name, dtype, sizes.split(", ") if sizes else [], int(least) if least else None) for name, dtype, sizes, least in found]


def _sizes_of(operands: list[tuple[str, str, list[str], int | None]], given: Named) -> Named | None:
    """The sizes of operands by name; None if these do not fit together."""
    sizes: dict[str, Any] = {"1": 1}
    for name, dtype, names, least in operands:
        if least is not None:
            if (sizes[name] if name in sizes else given[name]) < least:
                return None
            continue
        x = given[name]
        if dtype and x.dtype not in (DTYPES.get(dtype) or (given[dtype].dtype,)):
            return None
        shape = [*x.shape]
        if ".." in names:
            at, end = names.index(".."), names.index("..") + len(shape) + 1 - len(names)
            shape[at:end] = [tuple(shape[at:end])] if end >= at else []
        if len(shape) != len(names):
            return None
        for size, extent in zip(names, shape, strict=True):
            if sizes.setdefault(size, extent) != extent:
                return None
    return sizes


def _empty_results(results: str) -> Callable[[Named], Tensor | tuple[Tensor, ...]]:
    operands = _parse(results)

    def empty(given: Named) -> Tensor | tuple[Tensor, ...]:
        found = []
        for name, dtype, names, _ in operands:
            shape: list[int] = [] if names else [*given[name].shape]
            for size in names:
                shape += given[size] if size == ".." else [given[size]]
            found.append(given[name].new_empty(shape, dtype=DTYPES[dtype][0] if dtype else None))
        return tuple(found) if len(found) > 1 else found[0]

    return empty


def _register_gradient(made: torch.library.CustomOpDef, gradient: Function, names: list[str]) -> None:
    _, *wanted = inspect.signature(gradient).parameters
    results = [one.name for one in made._opoverload._schema.returns]

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        made = [output] if isinstance(output, Tensor) else output
        given = dict(zip([*names, *results, "shape"], [*inputs, *made, inputs[0].shape], strict=True))
        held = {name: value for name, value in given.items() if name in wanted}
        ctx.tensors = [name for name, value in held.items() if isinstance(value, Tensor)]
        ctx.save_for_backward(*(held.pop(name) for name in ctx.tensors))
        ctx.others = held

    def differentiate(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        found = gradient(grad, **dict(zip(ctx.tensors, ctx.saved_tensors, strict=True)), **ctx.others)
        return found, *[None] * (len(names) - 1)

    made.register_autograd(differentiate, setup_context=save)


def register_kernel(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Registers an operator of lists, or one that writes into operands, by its schema: `name(...) -> ...`."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"meshc::{name}", fake, lib=_LIBRARY)


def misfit(operator: str, rule: str, **operands: Tensor | None) -> ValueError:
    """ValueError that states `rule` and describes the operands, by name, for which it does not hold."""
    given = ", ".join(
        f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
        for name, tensor in operands.items()
        if tensor is not None
    )
    return ValueError(f"meshc::{operator}: {rule}; given are {given}")
