"""Code as ranks compare it: what a function is, which globals it reads, whether it asks for what is its process's own."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import sysconfig
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Final

from meshc.frontend.frames import PACKAGES
from meshc.frontend.reachable_values import digest as digest_of
from meshc.frontend.reachable_values import is_plain
from meshc.package import FOLDER

OWN: Final = frozenset(
    "get_rank get_node_local_rank get_local_rank get_group_rank get_global_rank get_coordinate get_process_group_ranks WORLD "
    "current_device getpid getppid gethostname get_ident getrandbits urandom "
    "process_index local_process_index is_main_process is_local_main_process is_last_process".split()
)
"""Names of what a process answers for itself; the last are Accelerate's."""
_RANKS: Final = ("process_index", "local_process_index", "device")
OF_PROCESSES: Final = {f"accelerate.state.{name}._shared_state": _RANKS for name in ("PartialState", "AcceleratorState")}
"""Where a package keeps, beside what is the same on all ranks, which of them this is: by place, the keys that are left out. Code that asks
for one by its name is known by it (`OWN`), and a device that a program names is compared with the program."""
ENVIRONMENT: Final = ("environ", "environb", "getenv")
VARIABLE: Final = re.compile(r"[A-Z][A-Z0-9_]+")
"""What the name of a variable of the environment looks like, where it stands as a text in code that reads the environment."""
OWN_MODULES: Final = ("random", "time", "uuid", "secrets", "socket", "platform", "tempfile")
"""Modules of Python's whose functions answer anew each time."""
TYPING: Final = (typing._GenericAlias, typing._SpecialForm, typing.TypeVar)  # type: ignore[attr-defined]

APART: Final = frozenset("huggingface_hub filelock httpx httpx2 httpcore httpcore2 requests urllib3 truststore psutil tqdm".split())
"""Packages that fetch files, lock them and show how far they are, which stock code names and no forward runs: they are not looked into, and
what a trace runs of them counts as not found."""
FETCHING: Final = frozenset(("transformers.utils.hub",))
"""Modules of which the same is true of their functions, in packages that are looked into. What other code reads of them counts."""

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
    if is_apart(module.__name__):
        return True
    file = getattr(module, "__file__", None)
    return module.__name__ in sys.builtin_module_names if file is None else _is_stock_file(file)


def is_stock_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return kind.__module__ == "builtins" or (module is not None and is_stock_module(module))


def is_foreign(value: object) -> bool:
    """Whether it is a function from elsewhere, which somebody has put into a class or module of torch's."""
    return isinstance(value, types.FunctionType) and not is_stock(value.__code__) and not value.__code__.co_filename.startswith("<")


def is_apart(module: str | None) -> bool:
    """Whether a module is of a package that is not looked into."""
    return module is not None and module.partition(".")[0] in APART


def is_unread(function: types.FunctionType) -> bool:
    """Whether a function's code is not looked into, since no forward runs it."""
    return is_apart(function.__module__) or function.__module__ in FETCHING


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


class Code:
    """One function's code with that of the functions inside it.

    names  of globals and attributes that stand in it, those in quotes too: getattr(x, "scale")
    asks   of each code the word by which it asks for what is its process's own; "": by none
    """

    def __init__(self, function: types.FunctionType) -> None:
        self._globals, self._module = function.__globals__, function.__module__
        self.asks = {code: self._asks(code) for code in nested(function.__code__)}
        self.names = list(dict.fromkeys(name for code in self.asks for name in (*code.co_names, *_quoted(code))))

    def _asks(self, code: types.CodeType) -> str:
        for name in code.co_names:
            value = self._globals.get(name)
            if name in OWN or (name in ENVIRONMENT and not variables(code)):
                return name
            if value is not None and not is_plain(value) and _is_own(value):
                return name
        return ""

    def globals(self) -> Iterator[tuple[str, object]]:
        """What its names are, by place; of a module that it names what it may read there. What torch and Python have of a name is
        theirs, unless somebody has put a function of his own in its place."""
        modules: list[types.ModuleType] = []
        for name in self.names:
            value = self._globals.get(name, sys.modules.get(name))
            if isinstance(value, types.ModuleType):
                modules.append(value)
            elif name in self._globals:
                yield f"{self._module}.{name}", value
        for module in modules:  # grows
            stock = is_stock_module(module)
            for name in self.names:
                value = vars(module).get(name)
                if isinstance(value, types.ModuleType):
                    if value not in modules:
                        modules.append(value)
                elif name in vars(module) and (not stock or is_foreign(value)):
                    yield f"{module.__name__}.{name}", value


def _quoted(code: types.CodeType) -> list[str]:
    return [text for text in code.co_consts if isinstance(text, str) and text.isidentifier()]


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
