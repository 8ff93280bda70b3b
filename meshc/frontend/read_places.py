"""Places of Python values that a trace has read, from Dynamo's guards, as data that other ranks and other starts can look up.

    L['self']._modules['_export_root']._modules['module'].config.alpha      model     .config .alpha
    G['__import_train'].D['beta']                                           train     .D ['beta']
    ....function.__closure__[0].cell_contents                               function  .__closure__ [0] .cell_contents
    dict(type(....module).__dict__)['temp']                                 model     type .__dict__ ['temp']

Left out is what is compared elsewhere or does not change: a model's modules, parameters, buffers, hooks and mode (`module_watch.py`),
inputs, Python's builtins, and globals of torch and meshc.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from meshc.frames import STANDARD

MODEL: Final = "model"
FUNCTION: Final = "function"
INPUTS: Final = "inputs"
"""Roots beside the modules of Python: the model that is compiled, the function that is traced, its arguments as leaves and their tree."""
ATTRIBUTE: Final = "."
ITEM: Final = "[]"
TYPE: Final = "type"
HAS_ITEM: Final = "in"
HAS_ATTRIBUTE: Final = "has"
KEY: Final = "key"
KEYS: Final = "keys"
NTH: Final = "nth"

_EXPORTED: Final = "L['self']._modules['_export_root']"
_MODEL: Final = f"{_EXPORTED}._modules['module']"
_IMPORT: Final = "__import_"
_WATCHED: Final = frozenset(
    "_parameters _buffers training forward _forward_hooks_with_kwargs _forward_pre_hooks_with_kwargs _forward_hooks_always_called "
    "_non_persistent_buffers_set __call__ _call_impl _compiled_call_impl".split()
)
"""Attributes of a model's modules that each call compares in any case, or that torch itself calls."""
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Likewise, except for values that a hook reads."""
_OWN: Final = ("torch", "meshc", "builtins", "typing", "types", "abc", "collections", "functools", "dataclasses", "contextlib", "enum")
"""Packages whose globals are taken to be constant."""
_CONSTANT: Final = ("CONSTANT_MATCH", "EQUALS_MATCH", "ID_MATCH")
_LARGEST_KEY: Final = 1 << 32
"""Greater integer keys are ids of objects, which differ between processes."""

Step = tuple[str, Any]
"""(".", name), ("[]", key), ("type", None), ("in", key), ("has", name), ("keys", None), ("key", index of the key), ("nth", index of the
entry): one step from a value to what is read of it."""


@dataclass(frozen=True)
class ReadPlace:
    """root: MODEL, FUNCTION, INPUTS, or the name of a Python module."""

    root: str
    steps: tuple[Step, ...]

    @property
    def bases(self) -> Iterator[ReadPlace]:
        """The places that contain this one, outermost first."""
        return (ReadPlace(self.root, self.steps[:length]) for length in range(1, len(self.steps)))

    def up(self, steps: int = 1) -> ReadPlace:
        """The place of which this one is so many steps away."""
        return ReadPlace(self.root, self.steps[:-steps])

    def then(self, *steps: Step) -> ReadPlace:
        return ReadPlace(self.root, (*self.steps, *steps))


def read_guards(guards: Iterable[Any]) -> tuple[list[ReadPlace], set[ReadPlace], list[str]]:
    """Of a trace's guards: the places that it has read; those among them whose values it has taken for constants; Dynamo's names of
    constants that have no place, in the model or in the user's files."""
    by_name: dict[str, ReadPlace | None] = {}  # a dozen guards may have one source
    places: dict[ReadPlace, None] = {}
    constants: set[ReadPlace] = set()
    without: dict[str, None] = {}
    for guard in guards:
        name = _name(guard.originating_source)
        if name not in by_name:
            by_name[name] = _parse_place(name)
        place, (kind, given) = by_name[name], _kind(guard)
        if place is not None:
            places |= dict.fromkeys((place, *_presence_places(place, kind, given), *shadows(place)))
            if kind in _CONSTANT:
                constants.add(place)
        elif kind in _CONSTANT and _is_users(name):
            without[name.replace(_MODEL, MODEL)] = None
    return list(places), constants, list(without)


def watched_at_calls(places: Iterable[ReadPlace]) -> list[ReadPlace]:
    """Those of `places` that each call compares again, and the places that contain them."""
    found: dict[ReadPlace, None] = {}
    for place in places:
        if not _is_left_out(place):
            found |= dict.fromkeys((*place.bases, place))
    return [place for place in found if place.steps]


def _kind(guard: Any) -> tuple[str, list[object]]:
    """The name of a guard's kind, and its arguments."""
    make: Any = guard.create_fn
    given: list[object] = []
    if isinstance(make, functools.partial):
        make, given = make.func, [*make.keywords.values(), *make.args]
    return getattr(make, "__name__", ""), given


def _is_users(name: str) -> bool:
    found = re.search(r"G\['__import_([^']+)'\]", name)
    if found is None:
        return _MODEL in name and "-packages" not in name
    module = found[1].replace("_dot_", ".")
    file = str(getattr(sys.modules.get(module), "__file__", "-packages"))
    return not is_own(module) and "-packages" not in file and not file.startswith(STANDARD)


def _name(source: Any) -> str:
    return str(source.name if isinstance(source.name, str) else source.name())


def place_of(source: Any) -> ReadPlace | None:
    """The place of a Dynamo source; None if it has none."""
    return _parse_place(_name(source))


def _parse_place(name: str) -> ReadPlace | None:
    if not name:
        return None
    try:
        return _place(ast.parse(name.replace(_EXPORTED, "ROOT"), mode="eval").body)
    except (_NotAPlace, SyntaxError):
        return None


def places_to_json(places: Iterable[ReadPlace]) -> list[list[Any]]:
    """The places as JSON."""
    return [[place.root, [list(step) for step in place.steps]] for place in places]


def places_from_json(rows: Sequence[Sequence[Any]]) -> tuple[ReadPlace, ...]:
    """The inverse of `places_to_json`."""
    return tuple(ReadPlace(str(root), tuple((str(kind), what) for kind, what in steps)) for root, steps in rows)


class _NotAPlace(Exception):
    """Raised for a source that is no place of this kind."""


def _presence_places(place: ReadPlace, kind: str, given: list[object]) -> Iterator[ReadPlace]:
    """Places for the presence of a dict's key, or of an object's own attribute, by a guard's kind and arguments."""
    if kind in ("DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK"):
        yield place.then((KEYS, None))
    name = next((one for one in given if isinstance(one, str)), None)
    if name is not None and kind in ("DICT_CONTAINS", "SET_CONTAINS", "DICT_NOT_CONTAINS", "SET_NOT_CONTAINS"):
        yield place.then((HAS_ITEM, name))
    elif name is not None and kind in ("NOT_PRESENT_IN_GENERIC_DICT", "HASATTR"):
        yield place.then((HAS_ATTRIBUTE, name))


def shadows(place: ReadPlace) -> Iterator[ReadPlace]:
    """For an attribute of a class's base, places for its presence in earlier classes of the method resolution order, which Dynamo assumes
    unchanged."""
    match place.steps:
        case (*_, (_, "__mro__"), (_, int(at)), held, (_, str(name))):
            for earlier in range(at):
                yield ReadPlace(place.root, (*place.steps[:-3], (ITEM, earlier), held, (HAS_ITEM, name)))


def _place(node: ast.expr) -> ReadPlace:
    steps: list[Step]
    match node:
        case ast.Name(id="ROOT"):
            return ReadPlace("", ())
        case ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant(value="flat_args")):
            return ReadPlace(INPUTS, ((ITEM, 0),))
        case ast.Attribute(value=ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant(value="self")), attr="in_spec"):
            return ReadPlace(INPUTS, ((ITEM, 1),))
        case (
            ast.Attribute(value=value, attr=name)
            | ast.Call(func=ast.Attribute(ast.Name("object"), "__getattribute__"), args=[value, ast.Constant(str(name))])  # torch 2.11
        ):
            steps = [(ATTRIBUTE, name)]
        case ast.Subscript(value=ast.Name(id="G"), slice=ast.Constant(value=str(name))) if name.startswith(_IMPORT):
            return ReadPlace(name.removeprefix(_IMPORT).replace("_dot_", "."), ())
        case ast.Subscript(
            ast.Call(ast.Name("list"), [ast.Call(ast.Attribute(ast.Name("dict"), "keys"), [value])]), ast.Constant(int(number))
        ):
            steps = [(KEY, number)]
        case ast.Subscript(value=ast.Call(func=ast.Name("list"), args=[ast.Call(args=[value])]), slice=ast.Constant(int(number))):
            steps = [(KEYS, None), (ITEM, number)]
        case ast.Subscript(value=value, slice=ast.Constant(value=str() | int() as key)) if isinstance(key, str) or key < _LARGEST_KEY:
            steps = [(ITEM, key)]
        case (
            ast.Subscript(value=value, slice=ast.Subscript(value=ast.Call(func=ast.Name("list")), slice=ast.Constant(int(number))))
            | ast.Call(ast.Attribute(ast.Name("dict"), "__getitem__"), [value, ast.Subscript(slice=ast.Constant(int(number)))])
        ):
            steps = [(NTH, number)]
        case ast.Call(func=ast.Name(id="dict"), args=[value]):
            return _place(value)
        case ast.Call(func=ast.Name(id="type"), args=[value]):
            return _place(value).then((TYPE, None))
        case _:
            raise _NotAPlace
    return _with_root(_place(value).then(*steps))


def _with_root(place: ReadPlace) -> ReadPlace:
    """The place with the model or the function as its root, which `meshc.frontend.capture.Root` holds."""
    if place.root:
        return place
    match place.steps:
        case ((_, "_modules"), (_, "module"), *rest):
            return ReadPlace(MODEL, tuple(rest))
        case ((_, "function"), *rest):
            return ReadPlace(FUNCTION, tuple(rest))
        case ((_, "_modules"),):
            return place
    raise _NotAPlace(str(place))


def _is_left_out(place: ReadPlace) -> bool:
    if place.root == MODEL:
        names = [what for kind, what in place.steps if kind in (ATTRIBUTE, HAS_ATTRIBUTE)]
        of_hooks = any((ATTRIBUTE, name) in place.steps[-2:] for name in _HOOKS)
        return not _WATCHED.isdisjoint(names) or (ATTRIBUTE, "_modules") in place.steps[-2:] or of_hooks
    return place.root != FUNCTION and (place.root in ("", INPUTS) or is_own(place.root))


def is_own(module: str) -> bool:
    """Whether a module is torch's, meshc's or Python's, with globals that are taken to be constant."""
    return module.partition(".")[0] in _OWN
