"""A context that restores Python state which a model's code changes: attributes, containers, globals, closures, random generators.

    self.seen += 1      CACHE[key] = mask      print(h.shape)      logger.warning_once("...")      torch.rand(())      self.scale.mul_(2)

Restored are Python values that the code can reach from the model: attributes, contents of lists and dicts, globals and class attributes of
the modules that define the model's classes, closures of its functions; and the state of random generators. Inside, nothing is printed,
logged or warned of.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

from meshc.replacements import replace_targets

PLAIN: Final = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, types.ModuleType)
LIBRARIES: Final = ("torch", "numpy", "builtins", "typing", "collections", "functools", "transformers.configuration_utils")
"""Modules whose globals and objects a model does not change by running."""


@contextlib.contextmanager
def preserve_python_state(module: nn.Module, functions: tuple[Callable[..., Any], ...] = ()) -> Iterator[list[torch.Tensor]]:
    """Yields the tensors that were found. `functions`: what is called beside the model."""
    kept = PythonState()
    for value in (module, *functions):
        kept.add(value)
    with _quiet(), _generators():
        try:
            yield kept.tensors
        finally:
            kept.restore()


class PythonState:
    """A snapshot of mutable Python state. Subclasses of dict and list are read and written by the base class's methods, past their own."""

    def __init__(self) -> None:
        self.seen: dict[int, Any] = {}
        self.tables: list[tuple[type[dict[Any, Any]], Any, list[tuple[Any, Any]]]] = []
        self.lists: list[tuple[list[Any], list[Any]]] = []
        self.sets: list[tuple[set[Any], set[Any]]] = []
        self.names: list[tuple[Any, dict[str, Any]]] = []
        self.cells: list[tuple[types.CellType, Any]] = []
        self.tensors: list[torch.Tensor] = []

    def add(self, value: Any) -> None:
        work = [value]
        while work:
            value = work.pop()
            if isinstance(value, PLAIN) or id(value) in self.seen:
                continue
            self.seen[id(value)] = value
            if isinstance(value, torch.Tensor):
                self.tensors.append(value)
                continue
            if isinstance(value, dict | list | set):
                work += self._container(value)
            elif isinstance(value, tuple | frozenset):
                work += value
            elif isinstance(value, types.FunctionType):
                work += self._of_function(value)
            elif isinstance(value, types.MethodType):
                work += (value.__self__, value.__func__)
            elif isinstance(value, type):
                self._of_class(value)
            else:
                work += (type(value), getattr(value, "__dict__", None))

    def _container(self, value: Any) -> Sequence[Any]:
        """Records a container; returns its items."""
        if isinstance(value, dict):
            kind: type[dict[Any, Any]] = OrderedDict if isinstance(value, OrderedDict) else dict
            items = list(kind.items(value))
            self.tables.append((kind, value, items))
            return [held for _, held in items]
        if isinstance(value, list):
            self.lists.append((value, list.copy(value)))
            return self.lists[-1][1]
        self.sets.append((value, set(set.__iter__(value))))
        return ()

    def _of_function(self, function: types.FunctionType) -> Iterator[Any]:
        if not _is_library(function.__module__):
            self._of_globals(function.__module__)
            yield function.__dict__
            for cell in function.__closure__ or ():
                with contextlib.suppress(ValueError):  # a cell that is still empty
                    self.cells.append((cell, cell.cell_contents))
                    yield cell.cell_contents

    def _of_class(self, kind: type) -> None:
        """Records a class's data attributes, and the globals of its module."""
        for base in kind.__mro__:
            if not _is_library(base.__module__):
                self._shallow(base)
                self._of_globals(base.__module__)

    def _of_globals(self, name: str) -> None:
        found = sys.modules.get(name)
        if found is not None and id(found) not in self.seen:
            self.seen[id(found)] = found
            self._shallow(found)

    def _shallow(self, owner: Any) -> None:
        """Records the data attributes of a class or module, and the items of containers among them."""
        data = (int, float, str, bytes, bool, type(None), dict, list, set, tuple)
        held = {name: value for name, value in vars(owner).items() if isinstance(value, data) and not name.startswith("__")}
        self.names.append((owner, held))
        for value in held.values():
            if isinstance(value, dict | list | set) and id(value) not in self.seen:
                self.seen[id(value)] = value
                self._container(value)

    def restore(self) -> None:
        for kind, table, items in self.tables:
            now = list(kind.items(table))
            if len(now) != len(items) or any(a[0] is not b[0] or a[1] is not b[1] for a, b in zip(now, items, strict=True)):
                kind.clear(table)
                for key, value in items:
                    kind.__setitem__(table, key, value)
        for each, before in self.lists:
            if len(each) != len(before) or any(a is not b for a, b in zip(list.copy(each), before, strict=True)):
                list.__setitem__(each, slice(None), before)
        for members, held in self.sets:
            if set(set.__iter__(members)) != held:
                set.clear(members)
                set.update(members, held)
        for owner, row in self.names:
            for name, value in row.items():
                if vars(owner).get(name, self) is not value:
                    setattr(owner, name, value)
        for cell, value in self.cells:
            if cell.cell_contents is not value:
                cell.cell_contents = value


def _is_library(name: str | None) -> bool:
    return name is None or name.partition(".")[0] in LIBRARIES or name in LIBRARIES


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences output and logging. The once-per-process warnings of transformers stay available for later."""
    with (
        warnings.catch_warnings(),
        replace_targets(warning_once=_nothing, info_once=_nothing, log=_nothing),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


@contextlib.contextmanager
def _generators() -> Iterator[None]:
    numpy: Any = sys.modules.get("numpy")
    state, pythons = torch.random.get_rng_state(), random.getstate()
    numpys = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.random.set_rng_state(state)
        random.setstate(pythons)
        if numpy is not None:
            numpy.random.set_state(numpys)
