"""Comparable settings of each layer in a request: optimizer groups, fixed storage, and the plan's patterns that match its names."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import nn

from meshc.passes.depth.captured_names import captured_lines
from meshc.passes.depth.mentions import NAME
from meshc.passes.depth.unequal import Unequal
from meshc.passes.phases.captured_depth import Depth
from meshc.passes.phases.request import Request
from meshc.plan.entries import OperatorPin, Pin, StoreLine
from meshc.plan.precision_lines import ProductLine
from meshc.plan.recipes import resolve

Line: TypeAlias = "Pin | StoreLine | OperatorPin | ProductLine"
DIMS = 4
"""Dims of parameters whose factors are called `<name>.<dim>`."""


class LayerSettings:
    """Settings of layers in one request."""

    def __init__(self, request: Request) -> None:
        self.grad, self.fixed = request.grad, request.fixed
        self.groups: dict[int, tuple[Any, ...]] = {}
        if (spec := request.optimizer) is not None:
            self.groups |= {id(parameter): (group.index,) for group in spec.groups for parameter in group.params}
            self.groups |= {id(parameter): ("idle", holder) for parameter, holder in spec.idle}
        self.plan = resolve(request.plan, request.mesh)
        changing = (*self.plan.precisions, *self.plan.sparsities)
        self.lines: tuple[Line, ...] = (*self.plan.pins, *self.plan.stores, *self.plan.operators, *changing)
        texts = [part.factor for line in (*self.plan.pins, *self.plan.stores) for dim in line.dims for part in dim.factors]
        texts += [split.factor for pin in self.plan.operators for split in pin.splits]
        texts += [text for entry in self.plan.axes for text in re.split(r"[\s,;>@]+", str(entry))]
        if any(NAME.fullmatch(text) for text in texts):
            raise Unequal("the plan names a dim by a number that goes by the layers (f0, f1, ...)")
        texts = [text for text in texts if re.search(r"[.*?\[]", text)]
        self.patterns = [*dict.fromkeys((text,) for text in texts), *_group_patterns(self.lines)]

    def among(self, depth: Depth) -> LayerSettings:
        """The same settings for the captured layers, by their numbers among these."""
        found = copy.copy(self)
        said = _group_patterns(captured_lines(self.lines, depth))
        found.patterns = [*self.patterns[: len(self.patterns) - len(said)], *said]
        return found

    def of(self, prefix: str, module: nn.Module) -> tuple[Any, ...]:
        """The settings of the layer at path `prefix`; equal settings give equal results."""
        parameters = [(f"{prefix}.{name}", parameter) for name, parameter in module.named_parameters(remove_duplicate=False)]
        groups = tuple(self.groups.get(id(parameter)) for _, parameter in parameters)
        fixed = tuple(str(self.fixed.get(name)).replace(f"{prefix}.", "") for name, _ in parameters)
        names = [*_names(prefix, module, [name for name, _ in parameters])] if self.patterns else []
        matches = tuple(tuple(any(fnmatchcase(name, one) for one in each) for name in names) for each in self.patterns)
        return groups, fixed, matches


def _group_patterns(lines: Iterable[Line]) -> list[tuple[str, ...]]:
    """Patterns of lines, grouped: lines that differ in their pattern alone are one group."""
    found: dict[object, dict[str, None]] = {}
    for line in lines:
        module, slash, operator = line.pattern.partition("/")
        found.setdefault(replace(line, pattern=slash + operator), {})[module] = None
    return [tuple(patterns) for patterns in found.values()]


def _names(prefix: str, module: nn.Module, parameters: list[str]) -> Iterator[str]:
    """Names in a layer that patterns of a plan may match."""
    for name, _ in module.named_modules():
        path = f"{prefix}.{name}" if name else prefix
        yield path
        yield f"value:{path}"
    for name in parameters:
        yield name
        yield from (f"{name}.{dim}" for dim in range(DIMS))
