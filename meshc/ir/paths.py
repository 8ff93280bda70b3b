"""Dotted paths of the leaves of a call's inputs and outputs: `logits`, `hidden.states.2`, `past_key_values.0.1`.

The leaves of a key-value cache are named by layer, then 0 for the key and 1 for the value, whatever the order in its class.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from meshc.ir import trees

CACHE_PARTS: Final = ("key_cache", "value_cache")
"""Fields of a transformers cache: the keys of all layers, then the values of all layers."""

Path = tuple[str, ...]


def spec_paths(spec: trees.Spec) -> list[str]:
    """The paths of a tree's leaves from its spec alone: some classes (caches) cannot be rebuilt from placeholders."""
    return [".".join(path) or "output" for path, _ in _leaves(spec)]


def is_cache(spec: trees.Spec) -> bool:
    """Whether a node of a tree is a key-value cache."""
    return getattr(spec.type, "__name__", "").endswith("Cache")


def leaves_around_caches(spec: trees.Spec) -> list[int | None]:
    """Indices of the leaves, with one None for each key-value cache in place of its leaves."""
    found: list[int | None] = []
    first = 0
    for node in specs_around_caches(spec):
        found.append(None if is_cache(node) else first)
        first += node.num_leaves
    return found


def specs_around_caches(spec: trees.Spec) -> Iterator[trees.Spec]:
    """The specs of leaves, and of key-value caches as one each."""
    if spec.is_leaf() or is_cache(spec):
        yield spec
        return
    for child in spec.children():
        yield from specs_around_caches(child)


def cache_paths(spec: trees.Spec) -> list[str]:
    """Paths of the leaves inside key-value caches."""
    return [".".join(path) for path, cached in _leaves(spec) if cached]


def input_names(function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> list[str]:
    """Paths of the leaves of (args, kwargs): positional arguments take the parameter names of `function`."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names: list[str] = []
    for position, argument in enumerate(args):
        named = position < len(parameters) and parameters[position].kind in (0, 1)
        names += _below(parameters[position].name if named else f"arg{position}", argument)
    for key, argument in kwargs.items():
        names += _below(key, argument)
    return names


def _below(name: str, argument: object) -> list[str]:
    return [".".join((name, *path)) for path, _ in _leaves(trees.structure(argument))]


def _leaves(spec: trees.Spec, path: Path = (), cached: bool = False) -> Iterator[tuple[Path, bool]]:
    """(path, whether the leaf is in a cache) of each leaf."""
    if spec.is_leaf():
        yield path, cached
        return
    here = is_cache(spec)
    keys = _keys(spec)
    for key, child in zip(keys, spec.children(), strict=True):
        if here and tuple(keys) == CACHE_PARTS:
            for (layer,), _ in _leaves(child):
                yield (*path, layer, str(CACHE_PARTS.index(key))), True
        else:
            yield from _leaves(child, (*path, key), cached or here)


def _keys(spec: trees.Spec) -> list[str]:
    """Names of the children of a tree's node: keys, fields, or indices."""
    count, context = len(spec.children()), spec.context
    if spec.type in (dict, OrderedDict):
        return [str(key) for key in context]
    if spec.type is defaultdict:
        return [str(key) for key in context[1]]
    fields = getattr(context, "_fields", None)  # a named tuple's context is its class
    for names in (fields, context, context[0] if isinstance(context, list | tuple) and context else None):
        if isinstance(names, list | tuple) and len(names) == count and all(isinstance(name, str) for name in names):
            return list(names)
    return [str(index) for index in range(count)]
