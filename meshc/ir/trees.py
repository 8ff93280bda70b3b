"""Pytrees of inputs and outputs: torch's own, with further classes that are trees to meshc but leaves to torch.

    learn(DynamicCache, flatten, unflatten)
    leaves({"logits": x, "past_key_values": cache})       x, the keys, the values
    torch.utils._pytree.tree_leaves(...)                  x, the cache: nothing of the process's own registry has changed

A class is in torch's registry only while one of these functions runs, or inside `registration()`, which is for torch's own code that walks
trees. For a class that other code has registered with torch, that registration holds.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from meshc.private import TreeSpec as Spec
from meshc.private import trees_of_fx as _of_fx
from meshc.private import trees_of_torch as _of_torch

Flatten = Callable[[Any], tuple[list[Any], Any]]
Unflatten = Callable[[Any, Any], Any]

_learned: Final[dict[type, tuple[Flatten, Unflatten, Flatten]]] = {}
_inside: Final[list[list[type]]] = []
"""For each open `registration()` of any thread, the classes that it has registered; guarded by the lock."""
_lock = threading.RLock()


def learn(kind: type, flatten: Flatten, unflatten: Unflatten, with_keys: Flatten | None = None) -> None:
    """Makes objects of a class trees to meshc. `flatten` returns (children, context), which `unflatten` takes; `with_keys` returns
    ((key, child) pairs, context), by which inputs are named. Without `with_keys` children are named by position."""
    _learned[kind] = flatten, unflatten, with_keys or _by_position(flatten)


def is_known(kind: type) -> bool:
    """Whether a class is a tree, registered here or with torch."""
    return kind in _learned or kind in _of_torch.SUPPORTED_NODES


def kinds() -> list[type]:
    """All classes that are trees, registered here or with torch."""
    return list(dict.fromkeys((*_of_torch.SUPPORTED_NODES, *_learned)))


def functions_of(kind: type) -> tuple[Callable[..., Any], ...]:
    """(flatten, unflatten) of a class; empty if the class is no tree."""
    if kind in _of_torch.SUPPORTED_NODES:
        node = _of_torch.SUPPORTED_NODES[kind]
        return node.flatten_fn, node.unflatten_fn
    return _learned.get(kind, ())


@contextlib.contextmanager
def registration() -> Iterator[None]:
    """A context in which learned classes are in torch's registry. Threads may overlap; the last to leave restores the registry."""
    if not _learned:
        yield
        return
    with _lock:
        _inside.append([kind for kind in _learned if kind not in _of_torch.SUPPORTED_NODES])
        for kind in _inside[-1]:
            _register(kind, *_learned[kind])
        mine = _inside[-1]
    try:
        yield
    finally:
        with _lock:
            if len(_inside) > 1:
                other = next(one for one in _inside if one is not mine)
                other += mine
            else:
                for kind in mine:
                    del _of_torch.SUPPORTED_NODES[kind], _of_fx.SUPPORTED_NODES[kind]
            _inside[:] = [one for one in _inside if one is not mine]


def _by_position(flatten: Flatten) -> Flatten:
    def flatten_with_positions(value: object) -> tuple[list[Any], object]:
        children, context = flatten(value)
        return [(_of_torch.SequenceKey(index), child) for index, child in enumerate(children)], context

    return flatten_with_positions


def _register(kind: type, flatten: Flatten, unflatten: Unflatten, with_keys: Flatten) -> None:
    _of_torch.SUPPORTED_NODES[kind] = _of_torch.NodeDef(kind, flatten, unflatten, with_keys)
    _of_fx.SUPPORTED_NODES[kind] = lambda value, spec: flatten(value)[0]


@contextlib.contextmanager
def capture_registration(kind: type) -> Iterator[list[tuple[Flatten, Unflatten]]]:
    """A context that undoes the registration of a class made inside; its list then holds the (flatten, unflatten) registered."""
    found: list[tuple[Flatten, Unflatten]] = []
    with _lock:
        yield found
        made = _of_torch.SUPPORTED_NODES[kind]
        found.append((made.flatten_fn, made.unflatten_fn))
        _of_torch._deregister_pytree_node(kind)
        _of_fx._deregister_pytree_flatten_spec(kind)


def flatten(tree: object) -> tuple[list[object], Spec]:
    with registration():
        return _of_torch.tree_flatten(tree)


def flatten_with_path(tree: object) -> tuple[Sequence[tuple[Sequence[object], object]], Spec]:
    with registration():
        return _of_torch.tree_flatten_with_path(tree)


def unflatten(leaves: Sequence[object], spec: Spec) -> Any:
    """The tree of these leaves. Raises ValueError if their number is not that of the spec."""
    if len(leaves) != spec.num_leaves:
        raise ValueError(f"{len(leaves)} leaves for a tree of {spec.num_leaves}")
    return build_tree(iter(leaves), spec)


def build_tree(leaves: Iterator[object], spec: Spec, whole: Callable[[Spec], bool] | None = None) -> Any:
    """The tree of `spec` with the next of `leaves`. A node for which `whole` is true takes one leaf in place of its subtree."""
    if spec.is_leaf() or whole is not None and whole(spec):
        return next(leaves)
    children = [build_tree(leaves, child, whole) for child in spec.children()]
    return children if spec.type is list else functions_of(spec.type)[1](children, spec.context)


def leaves(tree: object) -> list[object]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    with registration():
        return _of_torch.tree_leaves(tree)


def structure(tree: object) -> Spec:
    with registration():
        return _of_torch.tree_structure(tree)


def map_leaves(function: Callable[[Any], object], tree: object) -> Any:
    """The tree with `function` of each leaf."""
    if isinstance(tree, torch.Tensor):  # nearly all that a call asks for: there is nothing to take apart
        return function(tree)
    with registration():
        return _of_torch.tree_map(function, tree)
