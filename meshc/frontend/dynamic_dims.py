"""Dynamic sizes parsed from `Options(dynamic={"input_ids": {1: Dim("seq", max=2048)}})`: a call's sizes by name, and hints for passes.

The form is that of torch.export's `dynamic_shapes`: for each input, by path, its dims with a `torch.export.Dim`, as a dict, or as a tuple
or list with None for dims that are fixed. Dims of one name have one size. Sizes are those of the whole input, also with inputs="local".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from meshc.errors import InputError, PlanError
from meshc.ir.sizes import Dynamic, hint_for

UNBOUNDED = 1 << 31


@dataclass(frozen=True)
class DynamicDims:
    """dims: input path -> dim -> name of its size; ranges: name -> (least, greatest)."""

    dims: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.dims)

    def sizes(self, inputs: Sequence[tuple[str, Sequence[int]]]) -> dict[str, int]:
        """The dynamic sizes by name. `inputs`: (path, whole shape). Raises InputError, naming all sizes out of range or inconsistent."""
        found: dict[str, tuple[int, str]] = {}
        faults: list[str] = []
        for path, shape in inputs:
            for dim, name in self.dims.get(path, {}).items():
                if dim >= len(shape):
                    faults.append(f"{path} has {len(shape)} dims, and dim {dim} of it was said to be {name}")
                    continue
                here = f"dim {dim} of {path}"
                size, where = found.setdefault(name, (int(shape[dim]), here))
                if size != shape[dim]:
                    faults.append(f"{name} is {size} in {where} and {shape[dim]} in {here}")
        for name, (size, where) in found.items():
            low, high = self.ranges[name]
            if not low <= size <= high:
                faults.append(f"{name} is {size} ({where}); the program serves {name} {_range_text(low, high)}")
        if faults:
            raise InputError("sizes do not fit the program:\n  " + "\n  ".join(faults))
        return {name: size for name, (size, _) in found.items()}

    def key_with_names(self, path: str, described: tuple[object, ...]) -> tuple[object, ...]:
        """An input's entry of a key (`call_keys.input_key`), with names in the place of its dynamic sizes."""
        row = self.dims.get(path)
        if not row or described[0] != "tensor":
            return described
        kind, shape, *rest = described
        return (kind, tuple(row.get(dim, size) for dim, size in enumerate(cast(Sequence[int], shape))), *rest)

    def choose_hints(self, inputs: Sequence[tuple[str, Sequence[int]]], fixed: set[int], least: int) -> dict[str, Dynamic]:
        """The integer that stands for each size in passes: a prime near the example's size that equals no other size.

        `fixed` are the sizes of everything else in the model, `least` the number of pieces into which a plan may split a dim.
        """
        unknown = sorted(set(self.dims) - {path for path, _ in inputs})
        if unknown:
            known = ", ".join(path for path, _ in inputs) or "none"
            raise PlanError(f"Options(dynamic=...) names {', '.join(unknown)}, which is no tensor input; they are: {known}")
        taken: set[int] = set()
        found = {}
        for name, size in self.sizes(inputs).items():
            low, high = self.ranges[name]
            hint = hint_for(size, low, high, taken, fixed, least)
            taken.add(hint)
            found[name] = Dynamic(name, low, high, hint)
        return found


def _range_text(low: int, high: int) -> str:
    return f"from {low} to {high}" if high < UNBOUNDED else f"from {low} on"


def parse_dynamic(given: object) -> DynamicDims:
    """The dims and ranges of `Options(dynamic=...)`. Raises PlanError."""
    if given is None:
        return DynamicDims()
    if not isinstance(given, Mapping):
        raise PlanError(
            'Options(dynamic=...) is a dict by input: {"input_ids": {0: torch.export.Dim("batch", max=64)}}, '
            f"not a {type(given).__name__}"
        )
    dims: dict[str, dict[int, str]] = {}
    ranges: dict[str, tuple[int, int]] = {}
    for path, rows in given.items():
        if rows is None:
            continue
        pairs = rows.items() if isinstance(rows, Mapping) else enumerate(rows)
        for position, dim in pairs:
            if dim is None:
                continue
            name, low, high = _dim(dim, f"dim {position} of {path}")
            if ranges.setdefault(name, (low, high)) != (low, high):
                raise PlanError(f"Options(dynamic=...): {name} has two ranges, {_range_text(*ranges[name])} and {_range_text(low, high)}")
            dims.setdefault(str(path), {})[int(position)] = name
    return DynamicDims(dims, ranges)


def _dim(dim: object, where: str) -> tuple[str, int, int]:
    name = getattr(dim, "__name__", None)
    low, high = getattr(dim, "min", None), getattr(dim, "max", None)
    if not isinstance(name, str) or not name.isidentifier() or low is None or high is None or type(dim).__name__ != "Dim":
        raise PlanError(f'Options(dynamic=...): {where} is {dim!r}; say torch.export.Dim("seq", min=2, max=2048), with a name')
    least = 2 if int(low) == 0 else int(low)
    greatest = UNBOUNDED if str(high) == "int_oo" or int(high) > UNBOUNDED else int(high)
    if least < 2:
        raise PlanError(f"Options(dynamic=...): {name} may be {least}; tracing takes sizes of 1 apart (they broadcast): begin at 2")
    if greatest < least:
        raise PlanError(f"Options(dynamic=...): {name} goes {_range_text(least, greatest)}, which is nothing")
    return name, least, greatest
