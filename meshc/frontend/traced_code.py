"""Code that a trace has run: what it does, whether it is torch's, whether it asks for what is its process's own."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Final

from meshc.frontend.frames import PACKAGES
from meshc.package import FOLDER

OWN: Final = frozenset(
    "get_rank get_node_local_rank get_local_rank get_group_rank get_global_rank get_coordinate get_process_group_ranks WORLD "
    "current_device getpid getppid gethostname get_ident getrandbits urandom "
    "process_index local_process_index is_main_process is_local_main_process is_last_process".split()
)
"""Names of what a process answers for itself; the last are Accelerate's."""
ENVIRONMENT: Final = ("environ", "environb", "getenv")
VARIABLE: Final = re.compile(r"[A-Z][A-Z0-9_]+")
"""What the name of a variable of the environment looks like, where it stands as a text in code that reads the environment."""
OWN_MODULES: Final = ("random", "time", "uuid", "secrets", "socket", "platform", "tempfile")
"""Modules of Python's whose functions answer anew each time."""
_SPECS: Final = [spec for name in ("torch", "numpy", "sympy", "triton") if (spec := importlib.util.find_spec(name)) is not None]
_INSTALLED: Final = [folder for spec in _SPECS for folder in spec.submodule_search_locations or ()]
_FOLDERS: Final = tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in (*_INSTALLED, *map(str, (FOLDER, *FOLDER.glob("*/")))))
"""Of torch and what it stands on, wherever each is installed, and of meshc, whose rooms may be links."""
_PYTHON: Final = f"{os.path.realpath(sysconfig.get_paths()['stdlib'])}{os.sep}"
_OF_DATACLASSES: Final = frozenset(f"__{name}__" for name in "init repr eq lt le gt ge hash setattr delattr".split())
"""Methods that dataclasses make."""
_SAYS_WHERE: Final = hasattr(types.CodeType, "co_qualname")
"""Whether code says what it stands in; not in Python 3.10."""


@cache
def _is_stock_file(file: str) -> bool:
    if file.startswith("<frozen "):
        return True
    real = os.path.realpath(file)
    if real.startswith(_FOLDERS):
        return True
    return real.startswith(_PYTHON) and real[len(_PYTHON) :].partition(os.sep)[0] not in PACKAGES


def is_stock(code: types.CodeType) -> bool:
    """Whether code stands in a file of torch, Python or meshc."""
    return _is_stock_file(code.co_filename)


def qualified(code: types.CodeType) -> str:
    """Its name with the classes and functions that it stands in; in Python 3.10 its own name alone."""
    return code.co_qualname if _SAYS_WHERE else code.co_name


def is_generated(code: types.CodeType) -> bool:
    """Whether it is what named tuples and dataclasses make of the fields of a class, which are compared with the class."""
    if code.co_filename != "<string>":
        return False
    of_dataclass = code.co_name in _OF_DATACLASSES and (qualified(code).startswith("__create_fn__.<locals>.") or not _SAYS_WHERE)
    return of_dataclass or "_tuple_new" in code.co_names


def is_stock_module(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return module.__name__ in sys.builtin_module_names if file is None else _is_stock_file(file)


def is_stock_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return kind.__module__ == "builtins" or (module is not None and is_stock_module(module))


def is_foreign(value: object) -> bool:
    """Whether it is a function from elsewhere, which somebody has put into a class or module of torch's."""
    return isinstance(value, types.FunctionType) and not is_stock(value.__code__) and not value.__code__.co_filename.startswith("<")


def short_file(code: types.CodeType) -> str:
    return os.path.basename(code.co_filename)


def name_of(value: object) -> str:
    """A class or function by module and name; what has none by its text."""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if name is None:
        return str(value)
    module = getattr(value, "__module__", None)
    return str(name) if module in (None, "builtins") else f"{module}.{name}"


def digest(code: types.CodeType) -> str:
    """Of what code does, not of where it stands."""
    told = (
        code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_argcount, code.co_posonlyargcount,
        code.co_kwonlyargcount, code.co_flags, code.co_exceptiontable, [_constant(value) for value in code.co_consts],
    )  # fmt: skip
    return digest_of(repr(told).encode())


def digest_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _constant(value: object) -> str:
    if isinstance(value, types.CodeType):
        return digest(value)
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(repr, value))}"
    return f"({', '.join(map(_constant, value))})" if isinstance(value, tuple) else repr(value)


def nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code, and that of the functions inside it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from nested(value)


def asks(code: types.CodeType, held: Mapping[str, object]) -> str:
    """The word by which code asks for what is its process's own; "": by none. held: the globals of its module."""
    for name in code.co_names:
        value = held.get(name)
        if name in OWN or (name in ENVIRONMENT and not variables(code)):
            return name
        if value is not None and _is_own(value):
            return name
    return ""


def variables(code: types.CodeType) -> list[str]:
    """Variables of the environment that code may read."""
    if {*ENVIRONMENT}.isdisjoint(code.co_names):
        return []
    return [text for text in code.co_consts if isinstance(text, str) and VARIABLE.fullmatch(text)]


def _is_own(value: object) -> bool:
    """Whether it is a module, or a function of one, that answers anew each time; or a function that is named for asking."""
    if isinstance(value, types.ModuleType):
        return value.__name__ in OWN_MODULES
    if getattr(value, "_dynamo_marked_constant", False) is True:
        return not str(getattr(value, "__module__", "")).startswith("transformers.")  # those say what is installed
    if not isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return False
    owner = getattr(value, "__self__", None)
    modules = (getattr(value, "__module__", None), type(owner).__module__ if owner is not None else None)
    return value.__name__ in OWN or any(module in OWN_MODULES for module in modules)
