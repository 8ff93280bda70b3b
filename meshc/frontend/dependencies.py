"""What of Python a program depends on, as data: what its trace has read, by place, and what stood there. Who finds the same at these
places, another rank or another start, would have made the same trace.

    model.layers.0.norm.eps                     1e-05
    model.config.hidden_act                     'silu'
    my_model.Block.forward                      function my_model.Block.forward 5d1c40f2...
    beta of the closure of loss                 0.5
    the variable MY_SWITCH                      not set

Places are those that guards of Dynamo name (`read_places.py`), and those of the code that has run, which it guards in part: a method where
its class has it, a function under its name in its module. Parameters and buffers are no part of it: ranks compare their names and shapes,
and their values are rank 0's.

`why` says of what nobody else can know whether it is the same: code that stands nowhere, or that asks for what is its process's own (its
rank, the time, Python's random numbers), and constants of the trace without a place.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from meshc.frontend import read_places, read_values, traced_code
from meshc.frontend.portable_values import function_of, portable
from meshc.frontend.read_places import ATTRIBUTE, FUNCTION, INPUTS, ITEM, MODEL, NTH, Place
from meshc.frontend.read_values import Resolved
from meshc.ir import trees
from meshc.ir.functions import Function, Keywords

_COMPARED_BEFORE: Final = frozenset(("_parameters", "_buffers", "training"))
"""Attributes of a model's modules that ranks and starts compare by themselves."""
_SHOWN: Final = 5


class Here:
    """Places as this process has them."""

    def __init__(self, model: nn.Module, function: Function, args: Sequence[object], kwargs: Keywords) -> None:
        self.there = Resolved({MODEL: model, FUNCTION: function, INPUTS: trees.flatten((tuple(args), dict(kwargs)))})
        self._names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}

    def text(self, place: Place, by_items: bool) -> str:
        """What stands at a place. by_items: what a list holds has places of its own."""
        if place.root not in sys.modules and place.root not in (MODEL, FUNCTION, INPUTS):
            with contextlib.suppress(Exception):  # as the trace has, which came to it
                importlib.import_module(place.root)
        value = self.there.at(place)[0]
        if read_places.is_own(place.root):
            return portable(value) if traced_code.is_foreign(value) else "torch's"
        if id(value) in self._names and isinstance(value, torch.Tensor):
            return f"the model's {self._names[id(value)]}"
        if place.steps[-1:] and str(place.steps[-1][1]).endswith("_hooks") and isinstance(value, dict):
            return f"{sum(not hasattr(hook, 'of_meshc') for hook in value.values())} hooks"
        return portable(value, whole=not by_items)

    def name(self, place: Place) -> str:
        """What a place is called."""
        return self.there.at(place)[1]

    def texts(self, places: Collection[Place]) -> dict[str, str]:
        """What stands where, by what people call it."""
        lists = _bases_of_items(places)
        return {self.name(place): self.text(place, place in lists) for place in places}

    def lines(self, places: Iterable[Place]) -> str:
        """A digest of where the code stands that is at these places: messages and comments name its lines."""
        codes = dict.fromkeys(function.__code__ for place in places if (function := function_of(self.there.at(place)[0])) is not None)
        rows = [(code.co_filename, code.co_firstlineno, code.co_linetable) for code in codes if not traced_code.is_stock(code)]
        return traced_code.digest_of(repr(rows).encode())


@dataclass(frozen=True)
class Dependencies:
    """
    values       what stands where, in the order in which it was read
    environment  variables of the environment that code may have read
    why          why nobody else can have the program; "" if they can
    """

    values: Mapping[Place, str]
    environment: Mapping[str, str]
    why: str

    def described(self) -> dict[str, object]:
        """As JSON holds it."""
        return {
            "places": read_places.described(self.values), "values": [*self.values.values()], "environment": dict(self.environment),
            "why": self.why,
        }  # fmt: skip

    @staticmethod
    def read(told: Mapping[str, Any]) -> Dependencies:
        """What `described` gave."""
        values = dict(zip(read_places.read(told["places"]), told["values"], strict=True))
        return Dependencies(values, told["environment"], told["why"])

    def differences(self, here: Here) -> Iterator[str]:
        """Where this process differs from the one that has traced, a line each: `model.temperature: 2.0 here, and 1.0 there`."""
        lists = _bases_of_items(self.values)
        for place, there in self.values.items():
            mine = here.text(place, place in lists)
            if mine != there:
                yield f"{here.name(place)}: {mine} here, and {there} there"
        for name, there in self.environment.items():
            if (mine := _variable(name)) != there:
                yield f"the variable {name}: {mine} here, and {there} there"


def of_trace(
    read: Iterable[Place], numbers: Collection[Place], code: Iterable[types.CodeType], unplaced: Sequence[str], here: Here
) -> Dependencies:
    """Of one trace. read: what it has read, of which `numbers` are inputs; unplaced: constants that stand nowhere."""
    ran = [one for one in code if not traced_code.is_stock(one)]
    there, places = here.there, dict.fromkeys((Place(FUNCTION, ()), *read))
    places |= dict.fromkeys(read_values.methods(there, list(places), ran, installed=True))
    functions = _Globals(function_of(there.at(place)[0]) for place in places)
    rest = [one for one in ran if one not in functions.by_code]
    modules = _modules_by_file() if rest else {}
    for one in rest:
        place = _by_name(one, modules, there)
        if place is not None:
            places[place] = None
            functions.add(function_of(there.at(place)[0]))
    kept = [place for place in places if place not in numbers and not _is_compared_before(place)]
    lists = _bases_of_items(kept)
    values = {place: here.text(place, place in lists) for place in kept if not _is_input(place, here)}
    names = dict.fromkeys(name for one in ran for name in traced_code.variables(one))
    return Dependencies(values, {name: _variable(name) for name in names}, _why(ran, functions.by_code, unplaced))


def _variable(name: str) -> str:
    return os.environ.get(name, "not set")


def _bases_of_items(places: Iterable[Place]) -> frozenset[Place]:
    return frozenset(Place(place.root, place.steps[:-1]) for place in places if place.steps and place.steps[-1][0] == ITEM)


def _is_compared_before(place: Place) -> bool:
    """Whether ranks and starts compare it by itself, or it is of torch's own and by a number that processes have otherwise."""
    if place.root == MODEL:
        return any(kind == ATTRIBUTE and what in _COMPARED_BEFORE for kind, what in place.steps)
    return read_places.is_own(place.root) and any(kind == NTH for kind, _ in place.steps)


def _is_input(place: Place, here: Here) -> bool:
    return place.root == INPUTS and isinstance(here.there.at(place)[0], torch.Tensor)


class _Globals:
    """Code of functions, also of those inside them, with the globals that it reads."""

    def __init__(self, functions: Iterable[types.FunctionType | None]) -> None:
        self.by_code: dict[types.CodeType, Mapping[str, object]] = {}
        for function in functions:
            self.add(function)

    def add(self, function: types.FunctionType | None) -> None:
        if function is not None:
            self.by_code |= dict.fromkeys(traced_code.nested(function.__code__), function.__globals__)


def _by_name(code: types.CodeType, modules: Mapping[str, str], there: Resolved) -> Place | None:
    """Where code stands that no place holds: under its name in the module of its file, or inside the function of that name."""
    module = modules.get(os.path.abspath(code.co_filename))
    if module is None:
        return None
    *owners, name = traced_code.qualified(code).split(".<locals>")[0].split(".")
    steps = tuple(step for owner in owners for step in ((ATTRIBUTE, owner), (ATTRIBUTE, "__dict__")))
    place = Place(module, (*steps, (ITEM if steps else ATTRIBUTE, name)))
    found, seen = [place], set[types.FunctionType]()
    for place in found:  # grows: what decorators have made of it holds it
        function = function_of(there.at(place)[0])
        if function is None or function in seen:
            continue
        seen.add(function)
        if code in traced_code.nested(function.__code__):
            return place
        found.append(place.then((ATTRIBUTE, "__wrapped__")))
        cells = range(len(function.__closure__ or ()))
        found.extend(place.then((ATTRIBUTE, "__closure__"), (ITEM, at), (ATTRIBUTE, "cell_contents")) for at in cells)
    return None


def _modules_by_file() -> dict[str, str]:
    files = [(getattr(module, "__file__", None), name) for name, module in [*sys.modules.items()]]
    return {os.path.abspath(file): name for file, name in files if isinstance(file, str)}


def _why(ran: Iterable[types.CodeType], functions: Mapping[types.CodeType, Mapping[str, object]], unplaced: Sequence[str]) -> str:
    for one in ran:
        if traced_code.is_generated(one):
            continue
        where = f"{traced_code.qualified(one)} ({traced_code.short_file(one)}:{one.co_firstlineno})"
        if one not in functions:
            return f"the model runs {where}, which stands neither in the model nor under its name in a module"
        if asked := traced_code.asks(one, functions[one]):
            return f"the model runs {where}, which reads {asked}: that may differ from rank to rank"
    if unplaced:
        return f"the model reads {', '.join(unplaced[:_SHOWN])}, where no other rank can look"
    return ""
