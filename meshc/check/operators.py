"""Shapes, dtypes and strides of an operator's results, from meta tensors.

Torch's meta kernels and the fakes of meshc's own operators compute these without allocating or reading memory. Arguments that they do not
check are checked here: sizes with products that overflow, lists with as many results as a size says.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from meshc.check.guards import fault
from meshc.check.types import MOST_EXTENT, Wrong
from meshc.errors import ArtifactError
from meshc.private import OpOverload
from meshc.program.program import Origin

aten = torch.ops.aten

MOST_ITEMS: Final = 1 << 16
"""Most items of a list among the arguments."""
INDICES: Final = ("index", "indices", "offsets", "choice", "ends")
"""Names of operands that select elements."""
_END: Final = (1 << 63) - 1
"""The `end` of a slice that goes to the end of its dim."""

PIECES: Final[Mapping[OpOverload, Callable[..., int]]] = {
    **dict.fromkeys((aten.unbind.int, aten.unbind_copy.int), lambda x, dim=0: x.shape[dim]),
    **dict.fromkeys((aten.split.Tensor, aten.unsafe_split.Tensor), lambda x, size, dim=0: -(-x.shape[dim] // max(size, 1))),
    **dict.fromkeys(
        (aten.split_with_sizes.default, aten.split_with_sizes_copy.default, aten.unsafe_split_with_sizes.default),
        lambda x, lengths, dim=0: len(lengths),
    ),
}
"""Number of results of the operators that return a list."""


def infer_result(
    target: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], count: int
) -> Tensor | int | Sequence[Tensor | int] | None:
    """The results of `target` for meta tensors; `count` is the number of declared results. Raises Wrong."""
    named = [(argument, value) for argument, value in zip(target._schema.arguments, args, strict=False)]
    named += [(argument, kwargs[argument.name]) for argument in target._schema.arguments if argument.name in kwargs]
    for argument, value in named:
        _check_argument(value, sizes="int" in str(argument.type))
        _check_kind(argument, value)
        if argument.name in INDICES:
            _check_index(argument.name, value)
    kwargs = dict(kwargs)
    if kwargs.get("pin_memory"):
        raise Wrong("programs pin no memory")
    if any(argument.name == "device" and argument.kwarg_only for argument in target._schema.arguments):
        kwargs["device"] = torch.device("meta")  # also where no device is given: factory functions would allocate memory
    try:
        if target in PIECES and PIECES[target](*args, **kwargs) != count:
            raise Wrong(f"it gives {PIECES[target](*args, **kwargs)} results, {count} are declared")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrong = fault(target, args, kwargs)
            if wrong is not None:
                raise Wrong(f"its operands do not fit: {wrong}")
            found = target(*args, **kwargs)
    except Wrong:
        raise
    except Exception as error:  # a meta kernel may raise any class of error
        raise Wrong(f"its operator does not take these operands: {first_line(error)}") from error
    for value in found if isinstance(found, list | tuple) else (found,):
        if isinstance(value, Tensor):
            _check_memory(value)
    return found


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def error_at_line(origin: Origin, name: str, error: Exception) -> ArtifactError:
    """ArtifactError with the file and line of the value `name` of a loaded program, whose operator failed with `error` in a run."""
    advice = "what to do: correct the inputs if the values at fault are theirs; otherwise compile and save the program again"
    return ArtifactError(f"{origin.fault(name, f'{name} could not be made: {first_line(error)}')}\n  {advice}")


def _check_argument(value: object, sizes: bool) -> None:
    """Raises Wrong for long lists, large sizes and the meta device. `sizes`: integers in `value` are sizes or positions, not data."""
    if isinstance(value, list | tuple):
        if len(value) > MOST_ITEMS:
            raise Wrong(f"a list of {len(value)} is among its arguments; at most {MOST_ITEMS} may stand in one")
        for item in value:
            _check_argument(item, sizes)
    elif sizes and type(value) is int and abs(value) > MOST_EXTENT and value != _END:
        raise Wrong(f"{value} is among its arguments, larger than any size of a program")
    elif isinstance(value, torch.device) and value.type == "meta":
        raise Wrong("a value on the meta device has no memory")


def _check_index(name: str, value: object) -> None:
    """Raises Wrong for an index of floating point or complex numbers, which meta kernels do not refuse. Masks may be indices."""
    for index in value if isinstance(value, list | tuple) else (value,):
        if isinstance(index, Tensor) and (index.is_floating_point() or index.is_complex()):
            raise Wrong(f"its operator does not take these operands: its {name} is {index.dtype}, where integers say which")


_CONSTANTS: Final = {"ScalarType": torch.dtype, "Layout": torch.layout, "MemoryFormat": torch.memory_format}


def _check_kind(argument: torch.Argument, value: object) -> None:
    """Raises Wrong for a number in the place of a dtype, layout or memory format: torch uses it as an index into a table, unchecked."""
    kind = _CONSTANTS.get(str(argument.real_type).removeprefix("Optional[").removesuffix("]"))
    if value is not None and kind is not None and not isinstance(value, kind):
        raise Wrong(f"its operand {argument.name} is {value!r:.60}, and must be a {kind.__name__}")


def _check_memory(value: Tensor) -> None:
    """Raises Wrong for a tensor that is not strided, and for a view that reaches beyond the memory of its base."""
    if value.layout != torch.strided:
        raise Wrong(f"it is {value.layout}, where a program's values are dense")
    last = value.storage_offset() + sum((extent - 1) * stride for extent, stride in zip(value.shape, value.stride(), strict=True))
    if value.numel() and (last + 1) * value.itemsize > value.untyped_storage().nbytes():
        raise Wrong(f"{list(value.shape)} with strides {list(value.stride())} reaches beyond the memory of what it views")
