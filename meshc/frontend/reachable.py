"""What of Python a trace of a model can read, by place. Ranks for which it is the same make the same trace, so that one of them is enough.

    model.layers.0.norm.eps                     1e-05
    model.config.hidden_size                    64
    model.layers.0, forward hook 0              function train.clip
    code of my_model.Block.forward              5d1c40f2...
    my_model.SCALE                              0.5
    my_model.Block.window                       128

Values are followed from the model through attributes, containers, defaults and closures, whether a forward reads them or not. Code is
followed by its names: what a global of that name is, and what it is in each class that there is something of; so `generate` and
`save_pretrained` are no part of it, as long as no forward names them. Files of torch, Python and meshc are not looked into: their versions
are compared elsewhere. Parameters and buffers count with name, shape and dtype: their values are rank 0's.

Two things are left to who has traced, and knows what has run (`Reachable.beyond`): code that this has not come to, and code that asks for
what is each process's own (its rank, its environment, the time, Python's random numbers).
"""

from __future__ import annotations

import contextlib
import enum
import functools
import operator
import os
import types
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshc.frontend import reachable_code as found
from meshc.frontend.reachable_code import Code, is_stock, name_of
from meshc.frontend.reachable_values import OPAQUE, PLAIN, SAY_LITTLE, is_plain, of_tensor, shown
from meshc.ir import trees

MOST: Final = 200_000
"""Objects looked at; a model that leads to more (a trainer's data, say) is not compared."""

HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""What a module holds of functions that run with it, by numbers that differ between processes."""
OF_HOOKS: Final = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
_ENVIRONMENT: Final = "the environment's "
NAMED: Final = ("forward", "backward", "setup_context", "vmap")
"""What is called though nobody's code may name it."""
CONSTRUCT: Final = ("__init__", "__new__", "__post_init__")
"""What a class has for those that are yet to be made: read where code names the class itself."""
HASHES: Final = ("_original_object_hash",)
"""Attributes of transformers' that hold what Python's `hash` makes of texts, which is another number in each process."""
UNREAD: Final = frozenset(
    "__doc__ __module__ __qualname__ __dict__ __weakref__ __annotations__ __annotate__ __annotate_func__ __abstractmethods__ "
    "__parameters__ __orig_bases__ __slots__ __firstlineno__ __static_attributes__ __dataclass_fields__ __dataclass_params__ "
    "__match_args__ __slotnames__ __repr__ __str__ __format__ __del__ __dir__ __sizeof__ __reduce__ __reduce_ex__ __getstate__ "
    "__setstate__ __getnewargs__ __copy__ __deepcopy__ __init_subclass__ __subclasshook__ __class_getitem__ __replace__".split()
)
"""What a class has that no forward runs by itself; where code names one, it is read like any other."""


@dataclass
class Reachable:
    """
    places  what there is, by place
    code    the code that was come to, and by which word it asks for what is its process's own; "": by none
    why     why it cannot be compared; "" if it can
    """

    places: dict[str, str] = field(default_factory=dict)
    code: dict[types.CodeType, str] = field(default_factory=dict)
    why: str = ""

    def beyond(self, traced: Iterable[types.CodeType]) -> str:
        """Why another rank's trace may be another one all the same, of code that a trace has run; "" if nothing speaks for it."""
        for code in traced:
            if is_stock(code) or found.is_generated(code):
                continue
            where = f"{found.qualified(code)} ({found.short_file(code)}:{code.co_firstlineno})"
            if code not in self.code:
                return f"the model runs {where}, which is not found from the model's own attributes and names"
            if self.code[code]:
                return f"the model runs {where}, which reads {self.code[code]}: that may differ from rank to rank"
        return ""


def forwards(model: nn.Module) -> list[types.CodeType]:
    """The code of each module's forward."""
    found = [getattr(module.forward, "__code__", None) for module in model.modules()]
    return [code for code in dict.fromkeys(found) if code is not None]


def environment(traced: Iterable[types.CodeType]) -> dict[str, str]:
    """Variables of the environment that code of the users' files may have read, and what they are here."""
    return variables(name for code in traced if not is_stock(code) for name in found.variables(code))


def variables(names: Iterable[str]) -> dict[str, str]:
    """What variables of the environment are on this rank, by place."""
    return {f"{_ENVIRONMENT}{name}": os.environ.get(name, "not set") for name in names}


def variables_of(places: Iterable[str]) -> dict[str, str]:
    """The same variables as another rank's."""
    return variables(place.removeprefix(_ENVIRONMENT) for place in places)


def difference(mine: Mapping[str, str], theirs: Mapping[str, str], other: int = 0) -> str:
    """Where two ranks differ first, in words; "" if they do not."""
    for place in (*mine, *(place for place in theirs if place not in mine)):
        here, there = mine.get(place), theirs.get(place)
        if here != there:
            return f"{place}: this rank has {here or 'nothing there'}, rank {other} has {there or 'nothing there'}"
    return ""


def reachable(model: nn.Module, roots: Mapping[str, object]) -> Reachable:
    """From a model, and from what else is called or read beside it, by what it is. Nothing is called, and nothing is changed."""
    walk = _Walk(model)
    walk.follow("model", model)
    for name, root in roots.items():
        walk.follow(name, root)
    walk.run()
    return walk.reached


class _Walk:
    """What is yet to be looked at, nearest first, and what has been."""

    def __init__(self, model: nn.Module) -> None:
        self.reached = Reachable()
        self._queue: deque[tuple[str, Any]] = deque()
        self._first: dict[int, tuple[str, object]] = {}  # the objects too, so that no id is given again
        self._times: Counter[str] = Counter()
        self._owners: set[type] = set()
        self._constructed: set[type] = set()
        self._names: set[str] = set(NAMED)
        self._waiting: defaultdict[str, list[tuple[str, object]]] = defaultdict(list)
        held = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        self._state = {id(tensor): name for name, tensor in reversed(held)}

    def follow(self, place: str, value: object) -> None:
        self._queue.append((place, value))

    def run(self) -> None:
        looked = 0
        while self._queue and not self.reached.why:
            self._look(*self._queue.popleft())
            looked += 1
            if looked > MOST:
                self.reached.why = f"more than {MOST:,} Python objects hang on the model"

    def _put(self, place: str, text: str) -> None:
        self._times[place] += 1
        times = self._times[place]
        self.reached.places[place if times == 1 else f"{place} ({times})"] = shown(text)

    def _look(self, place: str, value: Any) -> None:
        if is_plain(value):
            return self._put(place, repr(value))
        if isinstance(value, enum.Enum):
            return self._put(place, f"{name_of(type(value))}.{value.name}")
        if id(value) in self._first:
            return self._put(place, f"the same as {self._first[id(value)][0]}")
        self._first[id(value)] = place, value
        for kinds, look in _WAYS:
            if isinstance(value, kinds):
                return look(self, place, value)
        return self._object(place, value)

    # ------------------------------------------------------------------------------------------------------------------- values

    def _tensor(self, place: str, tensor: Tensor) -> None:
        name = self._state.get(id(tensor))
        text = f"{tensor.dtype} {list(tensor.shape)}, requires_grad={tensor.requires_grad}"
        if name is not None:
            return self._put(place, f"the model's {name}, {text}")
        digest = of_tensor(tensor)
        if digest is None:
            return self._incomparable(place, tensor)
        return self._put(place, f"{text}, {digest}")

    def _sequence(self, place: str, items: Sequence[object]) -> None:
        self._put(place, f"a {name_of(type(items))} of {len(items)}")
        for index, item in enumerate(items):
            self.follow(f"{place}[{index}]", item)
        self._own(place, items)

    def _mapping(self, place: str, items: Mapping[object, object]) -> None:
        keys = [repr(key) if is_plain(key) else name_of(type(key)) for key in items]
        self._put(place, f"a {name_of(type(items))} of {', '.join(keys)}")
        left_out = found.OF_PROCESSES.get(place, ())
        for index, (key, value) in enumerate(dict.items(items) if isinstance(items, dict) else items.items()):
            if not is_plain(key):
                self.follow(f"{place}, key {index}", key)
            if key not in left_out:
                self.follow(f"{place}[{keys[index] if is_plain(key) else index}]", value)
        if isinstance(items, defaultdict):
            self.follow(f"{place}, default", items.default_factory)
        self._own(place, items)

    def _set(self, place: str, items: AbstractSet[object]) -> None:
        self._put(place, f"a {name_of(type(items))} of {', '.join(sorted(repr(i) if is_plain(i) else name_of(i) for i in items))}")
        for item in items:
            if not is_plain(item) and not isinstance(item, type | types.FunctionType | types.BuiltinFunctionType):
                return self._incomparable(place, item)
        return None

    def _module(self, place: str, module: nn.Module) -> None:
        self._put(place, f"a {name_of(type(module))}")
        self._class(type(module))
        held = vars(module)
        for name in sorted(held):
            value = held[name]
            if name in ("_parameters", "_buffers", "_modules"):
                self._put(f"{place}, {name[1:]}", ", ".join(value))
                for key, one in value.items():
                    self.follow(f"{place}.{key}", one)
            elif name in HOOKS:
                for index, hook in enumerate(one for one in value.values() if not hasattr(one, "of_meshc")):
                    self.follow(f"{place}, {name[1:-1].replace('_', ' ')} {index}", hook)
            elif name in OF_HOOKS:
                told = held.get(name.removesuffix("_with_kwargs").removesuffix("_always_called"), {})
                self._put(f"{place}, {name[1:]}", ", ".join(str(index) for index, key in enumerate(told) if key in value) or "none")
            elif not name.endswith("_hooks") and name != "_non_persistent_buffers_set":
                self.follow(f"{place}.{name}", value)

    def _object(self, place: str, value: object) -> None:
        kind = type(value)
        root = kind.__module__.partition(".")[0]
        if root in OPAQUE or found.is_apart(root) or kind is object or kind.__name__ in SAY_LITTLE:
            return self._put(place, f"a {name_of(kind)}")
        if not self._own(place, value, f"a {name_of(kind)}"):
            self._incomparable(place, value)
        return None

    def _own(self, place: str, value: object, said: str = "") -> bool:
        """An object's attributes, if it can have any, and its class."""
        kind = type(value)
        written = [owner for owner in kind.__mro__ if "__slots__" in vars(owner)]  # in Python: those of C have members that say little
        slots = {name: slot for owner in written for name, slot in vars(owner).items() if isinstance(slot, types.MemberDescriptorType)}
        has_own = kind.__dictoffset__ != 0
        if said:
            if not has_own and not slots:
                return False
            self._put(place, said)
        self._class(kind)
        held = dict(vars(value)) if has_own else {}
        for name, slot in slots.items():
            with contextlib.suppress(AttributeError):  # nothing stands there yet
                held[name] = slot.__get__(value)
        for name in sorted(held, key=str):
            if name not in HASHES:
                self.follow(f"{place}.{name}", held[name])
        return True

    def _group(self, place: str, group: dist.ProcessGroup) -> None:
        self._put(place, f"a process group of {group.size()}, and this is its rank {group.rank()}")

    def _incomparable(self, place: str, value: object) -> None:
        self.reached.why = f"{place} holds a {name_of(type(value))}, of which it cannot be told whether it is the same on all ranks"

    # --------------------------------------------------------------------------------------------------------------------- code

    def _function(self, place: str, function: types.FunctionType) -> None:
        code = function.__code__
        name = f"{function.__module__}.{function.__qualname__}"
        self._put(place, f"function {name}")
        if found.is_unread(function):
            return
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # nothing stands there yet
                self.follow(f"{name}, {variable} of its closure", cell.cell_contents)
        if is_stock(code):
            return
        self._put(f"code of {name}", found.digest(code))
        for index, value in enumerate(function.__defaults__ or ()):
            self.follow(f"{name}, default {index}", value)
        for key, value in (function.__kwdefaults__ or {}).items():
            self.follow(f"{name}, default of {key}", value)
        read = Code(function)
        self.reached.code |= read.asks
        for each in read.names:
            self._named(each)
        for where, value in read.globals():
            self.follow(where, value)

    def _named(self, name: str) -> None:
        """Some code has this name of an attribute: what there is of it counts from now on."""
        if name not in self._names:
            self._names.add(name)
            self._queue.extend(self._waiting.pop(name, ()))

    def _class(self, kind: type) -> None:
        """What there is something of."""
        for owner in kind.__mro__:
            if owner in self._owners:
                continue
            self._owners.add(owner)
            stock = found.is_stock_class(owner)
            where = name_of(owner)
            for index, function in enumerate(trees.functions_of(owner)):
                self.follow(f"{where}, as a tree, {index}", function)
            for name, value in vars(owner).items():
                if stock and not found.is_foreign(value):
                    continue
                place = f"{where}.{name}"
                if name in self._names or (name.startswith("__") and name.endswith("__") and name not in (*CONSTRUCT, *UNREAD)):
                    self.follow(place, value)
                elif name in CONSTRUCT:
                    self._waiting[f"{where}()"].append((place, value))
                elif type(value) in PLAIN and name not in UNREAD:
                    self._put(place, repr(value))
                else:
                    self._waiting[name].append((place, value))

    def _type(self, place: str, kind: type) -> None:
        """What code names itself, and may make things of."""
        self._put(place, f"class {name_of(kind)}")
        self._class(kind)
        for owner in kind.__mro__:
            self._named(f"{name_of(owner)}()")

    def _python_module(self, place: str, module: types.ModuleType) -> None:
        """One that is held as a value: of a user's, what code names anywhere."""
        self._put(place, f"module {module.__name__}")
        for name, value in () if found.is_stock_module(module) else vars(module).items():
            self._waiting[name].append((f"{module.__name__}.{name}", value))
            if name in self._names:
                self._queue.extend(self._waiting.pop(name))

    def _several(self, place: str, value: object, *names: str) -> None:
        """What holds others in attributes of these names."""
        self._put(place, f"a {name_of(type(value))}")
        for name in names:
            self.follow(f"{place}, {name}", getattr(value, name))

    def _operator(self, place: str, operator: Any) -> None:
        """One of the user's own: what `torch.library.custom_op` has made of a function, with what was registered for it."""
        self._put(place, f"operator {operator._qualname}")
        for name in ("_init_fn", "_abstract_fn", "_backward_fn", "_setup_context_fn"):
            self.follow(f"operator {operator._qualname}, {name}", getattr(operator, name, None))

    def _getter(self, place: str, getter: Any) -> None:
        """One that Python's `operator` makes, `attrgetter("config.scale")`: what it was made of. It names attributes as code does."""
        made_by, given = getter.__reduce__()[:2]
        self._put(place, f"a {name_of(type(getter))}")
        self.follow(f"{place}, made by", made_by)
        self.follow(f"{place}, made of", given)
        if not isinstance(getter, operator.itemgetter):
            for text in (*given, *getattr(made_by, "args", ())):
                for name in text.split(".") if isinstance(text, str) else ():
                    self._named(name)

    def _by_name(self, place: str, value: object) -> None:
        self._put(place, name_of(value))

    def _by_text(self, place: str, value: object) -> None:
        self._put(place, repr(value))


def _holding(*names: str) -> Callable[[_Walk, str, Any], None]:
    return lambda walk, place, value: walk._several(place, value, *names)


_BY_NAME: Final = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
    torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator,
)  # fmt: skip
_MADE_BY_CONTEXTMANAGER: Final = type(contextlib.contextmanager(iter)(()))
"""What decorates functions with a context: its generator is made anew for each call, of these."""
_WAYS: Final[tuple[tuple[Any, Callable[[_Walk, str, Any], None]], ...]] = (
    (Tensor, _Walk._tensor),
    (nn.Module, _Walk._module),
    (types.FunctionType, _Walk._function),
    (types.CodeType, lambda walk, place, code: walk._put(place, found.digest(code))),
    (types.MethodType, _holding("__self__", "__func__")),
    (functools.partial, _holding("func", "args", "keywords")),
    (_MADE_BY_CONTEXTMANAGER, _holding("func", "args", "kwds")),
    ((operator.attrgetter, operator.itemgetter, operator.methodcaller), _Walk._getter),
    (staticmethod | classmethod, _holding("__func__")),
    (property, _holding("fget", "fset")),
    (functools.cached_property, _holding("func")),
    (functools._lru_cache_wrapper, _holding("__wrapped__")),
    (types.ModuleType, _Walk._python_module),
    (_BY_NAME, _Walk._by_name),
    ((types.GenericAlias, types.UnionType, found.TYPING), _Walk._by_text),
    (torch.library.CustomOpDef, _Walk._operator),
    (type, _Walk._type),
    (dist.ProcessGroup, _Walk._group),
    ((list, tuple, deque), _Walk._sequence),
    ((dict, types.MappingProxyType), _Walk._mapping),
    ((set, frozenset), _Walk._set),
)  # fmt: skip
"""By kind, the first that fits."""
