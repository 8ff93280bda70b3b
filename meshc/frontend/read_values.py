"""Python values that a trace has read, compared again at each call: a hashable snapshot by place.

    reads = Reads(places, model, function)
    reads.values() is reads.values()             as long as every place holds the object that it held
    model.temperature = 2.0; reads.values()      another object, which equals an earlier one if all places hold the same again

The comparison is by identity, a container at a time; contents of a changed container are described again, and only another description is
another value: `model.config = copy.copy(model.config)` is none. Messages name a place as in `beta of the closure of loss`.
"""

from __future__ import annotations

import enum
import math
import re
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from operator import attrgetter, contains, is_, itemgetter
from typing import Any, Final, TypeGuard

import torch
from torch import nn

from meshc.frontend import read_places
from meshc.frontend.module_state import Identity
from meshc.frontend.module_watch import ModuleState
from meshc.frontend.portable_values import function_of, is_plain, of_tensor, short_text
from meshc.frontend.read_places import ATTRIBUTE, FUNCTION, HAS_ATTRIBUTE, HAS_ITEM, ITEM, KEY, KEYS, MODEL, NTH, TYPE, ReadPlace, Step
from meshc.frontend.traced_code import is_stock_class, name_of
from meshc.ir.functions import Function
from meshc.optimizer.spec import NumberGuard

Getter = Callable[[Any], tuple[Any, ...]]

LARGEST: Final = 1 << 53
"""Integers up to here are exact in double precision."""
MOST: Final = 1 << 16
"""Most elements of a list, or of a tensor, that are compared one by one."""
FEW: Final = 8
FIXED: Final = frozenset(("__closure__", "__mro__", "__class__", "__name__", "__func__", "__self__", "__dict__", "fget", "func", "args"))
"""Attributes that do not change during the life of their object."""

UNSAID: Final = ("_modules", "__dict__", "__closure__", "__func__", "__mro__", "__defaults__", "__kwdefaults__", "keywords")
"""Attributes that are left out of a place's name."""


class _Nothing:
    """The value of a place that does not exist."""

    def __repr__(self) -> str:
        return "nothing there"


NOTHING: Final = _Nothing()


@dataclass(frozen=True)
class Number:
    """name    of the input
    place   of the number
    whole   the number is an int
    guards  comparisons that branches of the trace depend on
    """

    name: str
    place: ReadPlace
    whole: bool
    guards: tuple[NumberGuard, ...] = ()

    def fits(self, value: object) -> TypeGuard[float]:
        """Whether a value may be passed for the number."""
        return is_number(value) and type(value) is (int if self.whole else float)

    def outcomes(self, value: float) -> tuple[object, ...]:
        return tuple(guard.outcome({self.name: value}) for guard in self.guards)


def is_number(value: object) -> bool:
    """Whether a value can be an input."""
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) <= LARGEST)


def numbers_to_json(numbers: Sequence[Number]) -> list[list[Any]]:
    """The numbers as JSON."""
    places = read_places.places_to_json(one.place for one in numbers)
    guards = [[[each.relation, each.constant] for each in one.guards] for one in numbers]
    return [[one.name, place, one.whole, row] for one, place, row in zip(numbers, places, guards, strict=True)]


def numbers_from_json(rows: Sequence[Sequence[Any]]) -> tuple[Number, ...]:
    """The inverse of `numbers_to_json`."""
    return tuple(
        Number(name, place, whole, tuple(NumberGuard(name, relation, float(constant)) for relation, constant in guards))
        for (name, _, whole, guards), place in zip(rows, read_places.places_from_json([row[1] for row in rows]), strict=True)
    )


class Values:
    """Values of places at one time, hashed once. `texts`: name of a place -> its value, for messages."""

    __slots__ = ("__weakref__", "_hash", "described", "keys", "places", "texts")

    def __init__(self, places: tuple[ReadPlace, ...], described: tuple[Hashable, ...], texts: dict[str, str]) -> None:
        self.places, self.described, self.texts = places, described, texts
        self.keys: dict[Hashable, Any] = {}
        """Keys of calls with these values, by what else decides them."""
        self._hash = hash((places, described))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Values):
            return NotImplemented
        return self is other or (self._hash, self.places, self.described) == (other._hash, other.places, other.described)

    def changes(self, before: Values) -> list[str]:
        """One line per difference: `model.temperature: 1.0 -> 2.0`."""
        rows = zip(self.texts.items(), before.described, self.described, strict=False)
        then = [*before.texts.values()]
        found = [(self.places[at], f"{name}: {then[at]} -> {now}") for at, ((name, now), a, b) in enumerate(rows) if a != b]
        bases = {base for place, _ in found for base in place.bases}
        return [line for place, line in found if place not in bases]  # the items that differ, not their list

    def numbers_changed(self, before: Values) -> list[ReadPlace]:
        """Places of numbers that differ."""
        rows = zip(self.places, before.described, self.described, strict=True)
        return [place for place, a, b in rows if a != b and all(isinstance(x, tuple) and x[:1] in ((int,), (float,)) for x in (a, b))]


class Reads:
    """Values at places, as this rank has them."""

    def __init__(self, places: Sequence[ReadPlace], model: nn.Module, function: Function, numbers: Sequence[Number] = ()) -> None:
        """numbers: inputs of a program among these places, whose values do not select another program."""
        self._roots: dict[str, Any] = {MODEL: model, FUNCTION: function}
        inputs = dict.fromkeys(one.place for one in numbers)  # in their order, which is the same on all ranks
        self.inputs = tuple(numbers)
        within = dict.fromkeys(base for place in inputs for base in place.bases)  # a container may be replaced, with another number in it
        self.places = (*(place for place in dict.fromkeys((*places, *within)) if place not in inputs), *inputs)
        self._numbers: list[tuple[Number, Callable[[], Any], Hashable, str]] = []
        self._look: _IdentityCheck | None = None
        self._values: Values | None = None

    def __len__(self) -> int:
        """The number of values that a call compares."""
        return 0 if self._look is None else self._look.count

    def values(self, state: ModuleState | None = None) -> Values:
        """The present values. state: of the model, as its watch has just found it."""
        if self._look is None or self._values is None or not (self._look.holds(state) and self._numbers_fit()):
            self._look, found = self._resolve()
            if found != self._values or self._values is None:
                self._values = found
        return self._values

    def numbers(self) -> dict[str, float]:
        """The present numbers that are inputs, by name. Call after `values`, which detects those that no longer fit."""
        if not self._numbers:
            return {}
        found = {number.name: float(get()) for number, get, _, _ in self._numbers}
        for (_, _, _, text), value in zip(self._numbers, found.values(), strict=True):
            self.values().texts[text] = repr(value)
        return found

    def _numbers_fit(self) -> bool:
        return all(_as_input(number, get()) == then for number, get, then, _ in self._numbers)

    def _resolve(self) -> tuple[_IdentityCheck, Values]:
        there, self._numbers = PlaceLookup(self._roots), []
        inputs = {one.place: one for one in self.inputs}
        by_items = {place.up() for place in self.places if place.steps[-1][0] == ITEM}
        self._tensors = frozenset(map(id, chain(self._roots[MODEL].parameters(), self._roots[MODEL].buffers())))
        look, described, texts = _IdentityCheck(self._roots[MODEL]), list[Hashable](), dict[str, str]()
        for place in self.places:
            value, text = there.at(place)
            text = f"{text} ({len(described) + 1})" if text in texts else text
            if _stays(place, there):
                described.append("")
                texts[text] = ""
                continue
            number = inputs.get(place)
            shallow = place in by_items and isinstance(value, list | tuple)
            described.append(_as_input(number, value) if number is not None else _shape(value) if shallow else self._describe(value))
            texts[text] = _value_text(value)
            base = there.value(place.up())
            if number is not None:
                self._numbers.append((number, partial(_take_step, base, place.steps[-1]), described[-1], text))
                continue
            look.note(base, place.steps[-1], value)
            if (TYPE, None) in place.steps:
                instance = there.value(ReadPlace(place.root, place.steps[: place.steps.index((TYPE, None))]))
                look.note(instance, (TYPE, None), type(instance))
            look.follow(value, shallow or (isinstance(value, torch.Tensor) and self._is_state(value)))
        look.close()
        return look, Values(self.places, tuple(described), texts)

    def _is_state(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the model's, or a parameter: its values are stored elsewhere."""
        return isinstance(tensor, nn.Parameter) or id(tensor) in self._tensors

    def _describe(self, value: Any) -> Hashable:
        if is_plain(value) or isinstance(value, enum.Enum):
            return type(value), repr(value)
        if isinstance(value, torch.Tensor):
            return "tensor" if self._is_state(value) else (value.dtype, tuple(value.shape), *_tensor_contents(value))
        if (code := code_of(value)) is not None:
            return Identity(code)
        if isinstance(value, list | tuple | AbstractSet):
            return _shape(value)
        if isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
            return Identity(value)
        return Identity(type(value))


def _tensor_contents(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """A tensor's contents: a hash of a small one, identity and version counter of others."""
    digest = of_tensor(tensor) if tensor.numel() <= MOST else None
    return (Identity(tensor), tensor._version) if digest is None else (digest,)


def code_of(value: Any) -> types.CodeType | None:
    """The code of a function, also of a method or property; None for any other value."""
    function = function_of(value)
    return None if function is None else function.__code__


def methods(there: PlaceLookup, places: Iterable[ReadPlace], traced: Iterable[types.CodeType], installed: bool = False) -> list[ReadPlace]:
    """Places of methods with code that a trace has run, in the classes of modules and of values that it has read, and in classes that it
    has read, which it may have instantiated; Dynamo assumes that classes keep their methods. `installed`: also read classes of installed
    packages."""
    ran, found = frozenset(traced), dict[type, ReadPlace]()
    modules = [ReadPlace(MODEL, _steps_to(path)) for path, _ in there.value(ReadPlace(MODEL, ())).named_modules()]
    for place in (*modules, *places):
        value = there.value(place)
        found.setdefault(type(value), place.then((TYPE, None)))
        if isinstance(value, type) and (installed or not _is_installed(value)):
            found.setdefault(value, place)
    rows = [
        place.then((ATTRIBUTE, "__mro__"), (ITEM, at), (ATTRIBUTE, "__dict__"), (ITEM, name))
        for kind, place in found.items()
        for at, owner in enumerate(kind.__mro__)
        if not is_stock_class(owner)
        for name, value in vars(owner).items()
        if code_of(value) in ran
    ]
    return [one for row in rows for one in (row, *read_places.shadows(row))]


def name_at(place: ReadPlace, model: nn.Module, function: Function) -> tuple[str, Any]:
    """A short name for a place, and its value: `beta` of a closure, `model.config.alpha`."""
    there = PlaceLookup({MODEL: model, FUNCTION: function})
    value, text = there.at(place)
    return re.sub(r" \([^()]*\)", "", text).removeprefix("default of "), value  # without the function's name


def _steps_to(path: str) -> tuple[Step, ...]:
    """The steps from a model to a module in it."""
    return tuple(step for name in path.split(".") if path for step in ((ATTRIBUTE, "_modules"), (ITEM, name)))


def _stays(place: ReadPlace, there: PlaceLookup) -> bool:
    """Whether the value at a place is taken to be constant: closures and defaults of an installed package's functions, and the attributes
    that its classes have."""
    kind, what = place.steps[-1]
    if kind == ATTRIBUTE and what in ("cell_contents", "__closure__", "__defaults__", "__kwdefaults__"):
        up = 3 if what == "cell_contents" else 1
        return _is_installed(there.value(place.up(up)))
    if kind == ITEM and place.steps[-2:-1] and place.steps[-2][1] in ("__closure__", "__defaults__", "__kwdefaults__"):
        return _is_installed(there.value(place.up(2)))
    if kind in (HAS_ITEM, HAS_ATTRIBUTE) and (TYPE, None) in place.steps:
        return _is_installed(there.value(ReadPlace(place.root, place.steps[: place.steps.index((TYPE, None)) + 1])))
    return False


def _is_installed(value: Any) -> bool:
    """Whether a function or class is of an installed package, not of a project's own files."""
    code = code_of(value)
    if code is None and isinstance(value, type):
        return "-packages" in str(getattr(sys.modules.get(value.__module__), "__file__", ""))
    return code is not None and "-packages" in code.co_filename


def _shape(value: Any) -> Hashable:
    """The description of a container whose items have places of their own."""
    return type(value), len(value)


def _as_input(number: Number, value: object) -> Hashable:
    """The part of a number that selects another program: the outcomes of its guards, if it is a valid input."""
    return ("an input", number.whole, number.outcomes(value)) if number.fits(value) else (type(value), repr(value))


def _value_text(value: Any) -> str:
    if is_plain(value) or isinstance(value, enum.Enum | _Nothing):
        return short_text(repr(value))
    if isinstance(value, torch.Tensor):
        few = type(value) is torch.Tensor and value.numel() <= FEW and not value.is_meta
        return f"a tensor {value.tolist()}" if few else f"a tensor of shape {list(value.shape)}"
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        return f"{name_of(value)} ({_line(value)})" if isinstance(value, types.FunctionType) else name_of(value)
    return f"a {name_of(type(value))}" + (f" of {len(value)}" if isinstance(value, list | tuple | dict) else "")


def _line(function: types.FunctionType) -> str:
    return f"{function.__code__.co_filename.rpartition('/')[2]}:{function.__code__.co_firstlineno}"


# ----------------------------------------------------------------------------------------------------------------------- at a place


class PlaceLookup:
    """Values and names by place, each looked up once."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._found = {ReadPlace(name, ()): (value, MODEL if name == MODEL else name_of(value)) for name, value in roots.items()}

    def at(self, place: ReadPlace) -> tuple[Any, str]:
        found = self._found.get(place)
        if found is None:
            if not place.steps:
                found = sys.modules.get(place.root, NOTHING), place.root
            else:
                base, text = self.at(place.up())
                found = _take_step(base, place.steps[-1]), self._place_name(place, base, text)
            self._found[place] = found
        return found

    def value(self, place: ReadPlace) -> Any:
        return self.at(place)[0]

    def _place_name(self, place: ReadPlace, base: Any, text: str) -> str:
        kind, what = place.steps[-1]
        if kind == ATTRIBUTE:
            if what == "cell_contents" and len(place.steps) > 2:
                function = self.value(place.up(3))
                names = getattr(getattr(function, "__code__", None), "co_freevars", ())
                at = place.steps[-2][1]
                name = names[at] if isinstance(at, int) and at < len(names) else what
                return name if _is_ours(function) else f"{name} (closure of {name_of(function)})"
            return text if what in UNSAID else f"{text}.{what}"
        if kind == ITEM:
            within = place.steps[-2][1] if len(place.steps) > 1 else ""
            if within in ("_modules", "__dict__"):
                return f"{text}.{what}"
            if within in ("__defaults__", "__kwdefaults__"):
                return _default(self.value(place.up(2)), what)
            known = within == "__mro__" and isinstance(base, tuple) and what < len(base)  # a class may be another one by now
            return name_of(base[what]) if known else f"{text}[{what!r}]"
        if kind in (HAS_ITEM, HAS_ATTRIBUTE):
            return f"{what!r} in {text}" if kind == HAS_ITEM else f"whether {text} has a {what} of its own"
        if kind in (KEY, NTH):
            return f"{text}, {'key' if kind == KEY else 'entry'} {what}"
        return f"the keys of {text}" if kind == KEYS else name_of(type(base))


def _default(function: Any, which: Any) -> str:
    code = getattr(function, "__code__", None)
    name = which
    if code is not None and isinstance(which, int):
        name = code.co_varnames[code.co_argcount - len(function.__defaults__ or ()) + which]
    return f"default of {name} ({name_of(function)})"


def _is_ours(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == "meshc"


def _take_step(base: Any, step: tuple[str, Any]) -> Any:
    """The value one step from `base`; nothing is changed, and no user code runs but that of attributes."""
    kind, what = step
    if base is NOTHING:
        return NOTHING
    try:
        if kind == ATTRIBUTE:
            held = getattr(base, "__dict__", None)
            return held[what] if type(held) is dict and what in held else getattr(base, what)
        if kind == ITEM:
            if isinstance(base, dict):
                return dict.__getitem__(base, what)
            return base[what] if isinstance(base, list | tuple | types.MappingProxyType) else NOTHING
        if kind == HAS_ITEM:
            return what in base
        if kind == HAS_ATTRIBUTE:
            return what in getattr(base, "__dict__", ())
        if kind in (KEY, KEYS):
            return tuple(base) if kind == KEYS else list(base)[what]
        if kind == NTH:
            return dict.__getitem__(base, _nth_key(base, what))
        return type(base)
    except (AttributeError, LookupError, TypeError, ValueError):
        return NOTHING


def _nth_key(base: Any, number: int) -> Any:
    """The key of an entry of a dict; meshc's own hooks do not count."""
    return [key for key, one in base.items() if not hasattr(one, "of_meshc")][number]


# ------------------------------------------------------------------------------------------------------------------------- the look


class _IdentityCheck:
    """Fast check that places hold the objects that they held: identities, read a container at a time without Python loops. As long as the
    model has the same state, dicts of its modules are left out at which its watch looks at each call."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._state: Callable[[], ModuleState | None] = lambda: None
        """The last with which all was looked at."""
        self.count = 0
        self._names: dict[tuple[type, int], tuple[Any, dict[Any, Any]]] = {}
        """By kind of getter and container: the container, and the object at each name."""
        self._keys: dict[int, tuple[Any, int | None]] = {}
        """How many of the first keys are compared; None: all."""
        self._equal: dict[tuple[Hashable, ...], tuple[Callable[[], Any], Any]] = {}
        """Reads of what has no identity, and their values."""

    def note(self, base: Any, step: tuple[str, Any], value: Any) -> None:
        """Records the value one step from `base`."""
        kind, what = step
        if base is NOTHING:
            return
        if kind == ATTRIBUTE:
            held = getattr(base, "__dict__", None)
            if type(held) is dict and what in held:
                self._note_name(itemgetter, held, what, value)
            elif what not in FIXED and not isinstance(value, types.MethodType) and value is not NOTHING:
                self._note_name(attrgetter, base, what, value)
        elif kind in (ITEM, NTH) and isinstance(base, dict | types.MappingProxyType | list):
            if value is not NOTHING:
                self._note_name(itemgetter, base, _nth_key(base, what) if kind == NTH else what, value)
        elif kind in (HAS_ITEM, HAS_ATTRIBUTE) and value is not NOTHING:
            self._equal[kind, id(base), what] = partial(contains, base if kind == HAS_ITEM else base.__dict__, what), value
        elif kind == TYPE:  # an object may become one of another class
            self._equal[kind, id(base)] = partial(type, base), value
        elif kind in (KEY, KEYS) and value is not NOTHING:
            many = self._keys.get(id(base), (base, 0))[1]
            self._keys[id(base)] = base, None if kind == KEYS or many is None else max(many, what + 1)

    def _note_name(self, get: type, held: Any, name: Any, value: Any) -> None:
        self._names.setdefault((get, id(held)), (held, {}))[1][name] = value

    def follow(self, value: Any, elsewhere: bool) -> None:
        """Records the contents of a value. `elsewhere`: its items have places of their own, or are compared elsewhere."""
        if isinstance(value, list):
            self._equal["length", id(value)] = partial(len, value), len(value)
            for at, item in enumerate(value if not elsewhere and len(value) <= MOST else ()):
                self._note_name(itemgetter, value, at, item)
        elif isinstance(value, torch.Tensor) and not elsewhere:
            self._equal["version", id(value)] = partial(getattr, value, "_version"), value._version
        elif isinstance(value, types.FunctionType) and not _is_installed(value):
            self._note_name(attrgetter, value, "__code__", value.__code__)

    def close(self) -> None:
        """Builds the getters and expected values, after the last `note`."""
        for held, many in self._keys.values():
            self._equal[KEYS, id(held)] = partial(_first_keys, held, many), _first_keys(held, many)
        rows = [(get, held, list(names.items())) for (get, _), (held, names) in self._names.items()]
        self.count = len(self._equal) + sum(len(names) for _, _, names in rows)
        rows = [(get, held, names * (2 if len(names) == 1 else 1)) for get, held, names in rows]  # a getter of tuples
        self._rows = [(get(*(name for name, _ in names)), held, [value for _, value in names]) for get, held, names in rows]
        self._reads, self._values = [read for read, _ in self._equal.values()], [value for _, value in self._equal.values()]
        self._all = self._beside = _join_rows(self._rows)

    def holds(self, state: ModuleState | None) -> bool:
        watched = state is not None and self._state() is state
        getters, then = self._beside if watched else self._all
        try:
            now = [get(held) for get, held in getters]
            same = all(map(is_, chain.from_iterable(now), then)) and [read() for read in self._reads] == self._values
        except (LookupError, AttributeError):
            return False
        if same and state is not None and not watched:
            dicts = {id(module._modules) for module in self._model.modules()}
            self._beside = _join_rows([row for row in self._rows if id(row[1]) not in dicts])
            self._state = weakref.ref(state)
        return same


def _join_rows(rows: Sequence[tuple[Getter, Any, list[Any]]]) -> tuple[list[tuple[Getter, Any]], list[Any]]:
    """Getters with their containers, and what all of them together are to give."""
    return [(get, held) for get, held, _ in rows], [value for _, _, values in rows for value in values]


def _first_keys(held: Any, many: int | None) -> tuple[Any, ...]:
    return tuple(islice(held, many))
