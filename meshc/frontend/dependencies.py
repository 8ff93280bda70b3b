"""Python state that a program depends on, as data: the places that its trace has read, and the value at each.

    model.layers.0.norm.eps                     1e-05
    model.config.hidden_act                     'silu'
    my_model.Block.forward                      function my_model.Block.forward 5d1c40f2...
    beta of the closure of loss                 0.5
    the variable MY_SWITCH                      not set

A process with equal values at these places, another rank or another start, would trace the same program.

Places are those that Dynamo's guards name (`read_places.py`), and those of the code that has run, which Dynamo guards only in part: a
method in its class, a function under its name in its module. Parameters and buffers are excluded: ranks compare their names and shapes,
and their values are rank 0's.

`why` names what no other process can compare: code without a place, or code that reads what is its process's own (its rank, the time,
Python's random numbers), and constants of the trace without a place.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Final

from torch import Tensor, nn

from meshc.environment import variable
from meshc.frontend import read_places, read_values, traced_code
from meshc.frontend.portable_values import function_of, portable
from meshc.frontend.read_places import ATTRIBUTE, FUNCTION, INPUTS, ITEM, MODEL, NTH, ReadPlace
from meshc.frontend.read_values import PlaceLookup
from meshc.ir import trees
from meshc.ir.functions import Function, Keywords

_COMPARED_BEFORE: Final = frozenset(("_parameters", "_buffers", "training"))
"""Attributes of a model's modules that ranks and starts compare separately."""
_SHOWN: Final = 5


class ProcessValues:
    """Values at places, as this process has them."""

    def __init__(self, model: nn.Module, function: Function, args: Sequence[object], kwargs: Keywords) -> None:
        self.there = PlaceLookup({MODEL: model, FUNCTION: function, INPUTS: trees.flatten((tuple(args), dict(kwargs)))})
        self._names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}

    def text(self, place: ReadPlace, by_items: bool) -> str:
        """The value at a place as text. `by_items`: the items of a list have places of their own."""
        if place.root not in sys.modules and place.root not in (MODEL, FUNCTION, INPUTS):
            with contextlib.suppress(Exception):  # as the trace did when it reached this module
                importlib.import_module(place.root)
        value = self.there.value(place)
        if read_places.is_own(place.root):
            return portable(value) if traced_code.is_foreign(value) else "torch's"
        if id(value) in self._names and isinstance(value, Tensor):
            return f"the model's {self._names[id(value)]}"
        if place.steps[-1:] and str(place.steps[-1][1]).endswith("_hooks") and isinstance(value, dict):
            return f"{sum(not hasattr(hook, 'of_meshc') for hook in value.values())} hooks"
        return portable(value, whole=not by_items)

    def name(self, place: ReadPlace) -> str:
        """The name of a place, as in messages."""
        return self.there.at(place)[1]

    def values(self, places: Collection[ReadPlace]) -> Iterator[tuple[ReadPlace, str]]:
        """Values at places as texts."""
        lists = {place.up() for place in places if place.steps and place.steps[-1][0] == ITEM}
        return ((place, self.text(place, place in lists)) for place in places)

    def texts(self, places: Collection[ReadPlace]) -> dict[str, str]:
        """Values as texts, by the names of their places."""
        return {self.name(place): text for place, text in self.values(places)}

    def lines(self, places: Iterable[ReadPlace]) -> str:
        """A digest of the source lines of the code at these places; messages and comments of a program name those lines."""
        codes = dict.fromkeys(function.__code__ for place in places if (function := function_of(self.there.value(place))) is not None)
        rows = [(code.co_filename, code.co_firstlineno, code.co_linetable) for code in codes if not traced_code.is_stock(code)]
        return traced_code.digest_of(repr(rows).encode())


@dataclass(frozen=True)
class Dependencies:
    """values       the value at each place, as text, in the order in which the trace read them
    environment  variables of the environment that code may have read
    why          why no other process can reuse the program; "" if one can
    """

    values: Mapping[ReadPlace, str]
    environment: Mapping[str, str]
    why: str

    def to_json(self) -> dict[str, object]:
        """The dependencies as JSON."""
        return {
            "places": read_places.places_to_json(self.values), "values": [*self.values.values()], "environment": dict(self.environment),
            "why": self.why,
        }  # fmt: skip

    @staticmethod
    def from_json(told: Mapping[str, Any]) -> Dependencies:
        """The inverse of `to_json`."""
        values = dict(zip(read_places.places_from_json(told["places"]), told["values"], strict=True))
        return Dependencies(values, told["environment"], told["why"])

    def differences(self, here: ProcessValues) -> Iterator[str]:
        """Where this process differs from the one that traced, a line each: `model.temperature: 2.0 here, and 1.0 there`."""
        for place, mine in here.values(self.values):
            if mine != (there := self.values[place]):
                yield f"{here.name(place)}: {mine} here, and {there} there"
        for name, there in self.environment.items():
            if (mine := variable(name)) != there:
                yield f"the variable {name}: {mine} here, and {there} there"


def trace_dependencies(
    read: Iterable[ReadPlace], numbers: Collection[ReadPlace], code: Iterable[CodeType], unplaced: Sequence[str], here: ProcessValues
) -> Dependencies:
    """Dependencies of one trace. `read`: the places it has read, of which `numbers` are inputs; `unplaced`: constants without a place."""
    ran = [one for one in code if not traced_code.is_stock(one)]
    there, places = here.there, dict.fromkeys((ReadPlace(FUNCTION, ()), *read))
    places |= dict.fromkeys(read_values.methods(there, list(places), ran, installed=True))
    globals_of = _globals_by_code(function_of(there.value(place)) for place in places)
    rest = [one for one in ran if one not in globals_of]
    files = [(getattr(module, "__file__", None), name) for name, module in [*sys.modules.items()]] if rest else []
    modules = {os.path.abspath(file): name for file, name in files if isinstance(file, str)}
    for one in rest:
        if (place := _place_by_name(one, modules, there)) is not None:
            places[place] = None
            globals_of |= _globals_by_code([function_of(there.value(place))])
    kept = [place for place in places if place not in numbers and not _is_compared_before(place)]
    kept = [place for place in kept if place.root != INPUTS or not isinstance(there.value(place), Tensor)]
    names = dict.fromkeys(name for one in ran for name in traced_code.variables(one))
    why = _reason_not_portable(ran, globals_of, unplaced)
    return Dependencies(dict(here.values(kept)), {name: variable(name) for name in names}, why)


def _is_compared_before(place: ReadPlace) -> bool:
    """Whether ranks and starts compare the place separately, or it is torch's own and found by a number that differs between processes."""
    if place.root == MODEL:
        return any(kind == ATTRIBUTE and what in _COMPARED_BEFORE for kind, what in place.steps)
    return read_places.is_own(place.root) and any(kind == NTH for kind, _ in place.steps)


def _globals_by_code(functions: Iterable[FunctionType | None]) -> dict[CodeType, Mapping[str, object]]:
    """Code objects of functions, nested ones included, with the globals that each reads."""
    known = [one for one in functions if one is not None]
    return {code: one.__globals__ for one in known for code in traced_code.nested_code(one.__code__)}


def _place_by_name(code: CodeType, modules: Mapping[str, str], there: PlaceLookup) -> ReadPlace | None:
    """The place of code that no known place holds: under its name in the module of its file, or inside the function of that name."""
    module = modules.get(os.path.abspath(code.co_filename))
    if module is None:
        return None
    *owners, name = traced_code.qualified_name(code).split(".<locals>")[0].split(".")
    steps = tuple(step for owner in owners for step in ((ATTRIBUTE, owner), (ATTRIBUTE, "__dict__")))
    place = ReadPlace(module, (*steps, (ITEM if steps else ATTRIBUTE, name)))
    found, seen = [place], set[FunctionType]()
    for place in found:  # grows: a decorator's wrapper holds the function
        function = function_of(there.value(place))
        if function is None or function in seen:
            continue
        seen.add(function)
        if code in traced_code.nested_code(function.__code__):
            return place
        found.append(place.then((ATTRIBUTE, "__wrapped__")))
        cells = range(len(function.__closure__ or ()))
        found.extend(place.then((ATTRIBUTE, "__closure__"), (ITEM, at), (ATTRIBUTE, "cell_contents")) for at in cells)
    return None


def _reason_not_portable(ran: Iterable[CodeType], functions: Mapping[CodeType, Mapping[str, object]], unplaced: Sequence[str]) -> str:
    for one in ran:
        if traced_code.is_generated(one):
            continue
        where = f"{traced_code.qualified_name(one)} ({os.path.basename(one.co_filename)}:{one.co_firstlineno})"
        if one not in functions:
            return f"the model runs {where}, which stands neither in the model nor under its name in a module"
        if asked := traced_code.process_local_name(one, functions[one]):
            return f"the model runs {where}, which reads {asked}: that may differ from rank to rank"
    if unplaced:
        return f"the model reads {', '.join(unplaced[:_SHOWN])}, where no other rank can look"
    return ""
