"""Structure of a model's output written as JSON and read back, for ranks that take rank 0's trace.

    {"hidden": [h, None], "layers": 2}    ["builtins.dict", ["hidden", "layers"], [["builtins.list", null, [0, 0]], 0]]   1: null, 2: 2

Classes are stored by name, and looked up among this process's pytree classes or, for types in the output, in its modules: nothing is
imported, and nothing is executed. A value that has no such form raises NotPlainData.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import torch

from meshc.frontend.output_tree import OutputTree
from meshc.ir import trees

Json: TypeAlias = Any

_PLAIN: Final = (type(None), bool, int, float, str)


class NotPlainData(Exception):
    """Raised for an output with a value that is no plain data, or a class that this process does not have."""


def tree_to_json(tree: OutputTree) -> Json:
    """The tree as JSON. Raises NotPlainData for a tree that `tree_from_json` would not restore."""
    told = {"spec": _spec_to_json(tree.spec), "plain": [[index, _value_to_json(leaf)] for index, leaf in tree.plain.items()]}
    if tree_from_json(told).spec != tree.spec:
        raise NotPlainData("the output's structure does not come back as it is")
    return told


def tree_from_json(told: Mapping[str, Json]) -> OutputTree:
    """The tree from its JSON. Raises NotPlainData for a class that is no tree in this process."""
    names = Counter(_name(kind) for kind in trees.kinds())
    known = {_name(kind): kind for kind in trees.kinds() if names[_name(kind)] == 1}
    return OutputTree(_spec_from_json(told["spec"], known), {index: _value_from_json(leaf) for index, leaf in told["plain"]})


def _name(kind: object) -> str:
    return f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', '')}"


def _spec_to_json(spec: trees.Spec) -> Json:
    return 0 if spec.is_leaf() else [_name(spec.type), _value_to_json(spec.context), [_spec_to_json(child) for child in spec.children()]]


def _spec_from_json(told: Json, known: Mapping[str, type]) -> trees.Spec:
    if told == 0:
        return trees.structure(None)
    name, context, children = told
    if name not in known:
        raise NotPlainData(f"{name}, of which the output is made, is no tree on this rank")
    return trees.Spec(known[name], _value_from_json(context), [_spec_from_json(child, known) for child in children])


def _value_to_json(value: Any) -> Json:
    """A plain value as it is; any other as {kind: its parts}."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in (list, tuple, torch.Size):
        return {kind.__name__: [_value_to_json(item) for item in value]}
    if kind is dict:
        return {"dict": [[_value_to_json(key), _value_to_json(item)] for key, item in value.items()]}
    if kind in (torch.dtype, torch.device):
        return {kind.__name__: str(value)}
    if isinstance(value, type) and _find_class(value.__module__, value.__qualname__) is value:
        return {"class": [value.__module__, value.__qualname__]}
    raise NotPlainData(f"the output holds a {_name(kind)}, which is no plain value")


def _value_from_json(told: Json) -> Any:
    if not isinstance(told, dict):
        return told
    ((kind, given),) = told.items()
    if kind in ("list", "tuple", "Size"):
        return {"list": list, "tuple": tuple, "Size": torch.Size}[kind](map(_value_from_json, given))
    if kind == "dict":
        return {_value_from_json(key): _value_from_json(item) for key, item in given}
    if kind == "dtype":
        return getattr(torch, given.removeprefix("torch."))
    if kind == "device":
        return torch.device(given)
    found = _find_class(*given)
    if found is None:
        raise NotPlainData(f"{'.'.join(given)}, of which the output is made, is no class on this rank")
    return found


def _find_class(module: str, name: str) -> type | None:
    value: object = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, type) else None
