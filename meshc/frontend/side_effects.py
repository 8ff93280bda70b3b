"""Side effects of a model's Python during a trace: changes of Python state are reported, prints and logs are carried out once.

    self.counter += 1      activations.append(h.detach())      CACHE[key] = mask      left out: a warning names the line
    assert (x > 0).all()   if x.isnan().any(): raise ValueError("nan")                left out: a warning names the line
    print(h.shape)         logger.info("%s", h)                warnings.warn("...")   carried out when tracing is over, once

Dynamo records each object from before the trace that the trace changes, with the lines that do so. Code that Dynamo compiles then makes
these changes after each call; a program has no such code, so it makes none. Some methods of Dynamo are replaced meanwhile: the one that
turns the record into code, the two that skip calls that print or log, and the one that calls builtin functions, for texts with tensors in
them.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from meshc.errors import join_names
from meshc.frames import innermost, is_torch, within_torchs_forward
from meshc.frontend.in_place_changes import changed_operand
from meshc.frontend.libraries.stock_models import is_stock_file
from meshc.frontend.omitted_checks import omit_checks
from meshc.frontend.read_places import ReadPlace, read_guards
from meshc.frontend.selected_places import name_of
from meshc.frontend.sources import bodies_of, source_of
from meshc.ir import Source
from meshc.ir.functions import Function
from meshc.replacements import replace_targets

CALLS: Final = (print, warnings.warn, logging.debug, logging.info, logging.warning, logging.error, logging.critical, logging.log)
METHODS: Final = {
    "debug": logging.DEBUG, "info": logging.INFO, "info_once": logging.INFO, "warning": logging.WARNING, "warning_once": logging.WARNING,
    "warn": logging.WARNING, "error": logging.ERROR, "exception": logging.ERROR, "critical": logging.CRITICAL,
}  # fmt: skip
"""Methods of loggers, and their levels; those that end in `once` are transformers'."""
TEXTS: Final = (str, repr, operator.mod, operator.add)
PLACE: Final = re.compile(r"%[^%a-zA-Z]*[a-zA-Z]")
"""The placeholder of a value in `"%5.2f of %s"`."""
SHOWN: Final = 5

LEFT_OUT: Final = "and a program leaves that out: no call"
"""Words by which a note is recognised as a warning."""
NOT_LOOKED_AT: Final = "what stands here is fixed, since it cannot be looked at again at each call (docs/fixed.md)"
"""Likewise."""
ASSERTS: Final = ("_assert", "_assert_async", "_assert_scalar")
"""Calls of a trace for an `assert` on tensor values, and for a branch that only raises (`omitted_checks.py`)."""


TORCHS: Final = "Runtime assertion failed for expression"
"""The first words of the message of a check that is torch's own."""


@dataclass
class TraceObservations:
    """The observations of one trace.

    changes  lines that change Python state outside of the program
    said     calls that print or log: (attempt at a trace, line, name, the call); Dynamo may trace several times
    code     Python code that has run
    places   Python values that were read;  constants  those whose values are constants of the trace
    without_place  constants that no call can compare again
    """

    changes: list[Source] = field(default_factory=list)
    said: list[tuple[Any, Source, str, Callable[[], None]]] = field(default_factory=list)
    code: tuple[CodeType, ...] = ()
    places: Sequence[ReadPlace] = ()
    constants: Set[ReadPlace] = frozenset()
    without_place: Sequence[str] = ()

    def notes(self) -> list[str]:
        last = self.said[-1][0] if self.said else None
        places = dict.fromkeys((place, name) for attempt, place, name, _ in self.said if attempt is last and not is_stock_file(place.file))
        found = [f"{place}: {name} was carried out once, while the model was traced; calls of the program do not" for place, name in places]
        if self.changes:
            advice = (
                "return such a value as an output, or keep it in a buffer (register_buffer) and change that in place, as in "
                "self.seen.add_(1)"
            )
            found.append(_lines_note(f"the model's code changes Python values, {LEFT_OUT} does it", self.changes, advice))
        if self.without_place:
            found.append(f"{NOT_LOOKED_AT}: {join_names(self.without_place, SHOWN)}")
        return found


def _lines_note(what: str, places: Sequence[Source], advice: str) -> str:
    lines = [f"  {place}: {place.code}" for place in places]
    more = [f"  and {len(lines) - SHOWN} lines more"] if len(lines) > SHOWN else []
    return "\n".join([what, *lines[:SHOWN], *more, f"  what to do: {advice}"])


def dropped_checks_note(module: GraphModule) -> list[str]:
    """A note of the user's lines that assert something of tensor values, which a program leaves out; [] if there are none."""
    nodes = [node for body in bodies_of(module) for node in body.graph.nodes if is_check(node) and not _is_torchs(node)]
    places = [place for place in dict.fromkeys(map(source_of, nodes)) if not is_stock_file(place.file)]
    advice = "check it before the call, or return the condition as an output and look at that"
    return [_lines_note(f"the model's code checks what tensors hold, {LEFT_OUT} does", places, advice)] if places else []


def _is_torchs(check: Node) -> bool:
    """Whether torch's tracer itself has written a check, of a size that a tensor decides."""
    return any(isinstance(one, str) and one.startswith(TORCHS) for one in check.args)


def is_check(node: Node) -> bool:
    """Whether a call asserts something of tensor values."""
    return name_of(node) in ASSERTS


def leave_out_checks(module: GraphModule) -> None:
    """Remove assertions on numbers that tensors hold, and the computation of these numbers where nothing else reads it.

        item = (ids >= 0).all().item();  one = sym_ite(item, 1, 0);  _assert_scalar(one >= 1, ...)
    """
    for body in bodies_of(module):
        for node in [node for node in body.graph.nodes if name_of(node) == ASSERTS[-1]]:
            erase_dead_code(node)
        body.recompile()


def erase_dead_code(node: Node) -> None:
    """Dead code elimination from one node: erases it if nothing reads it and it changes nothing, then its operands likewise."""
    if node.op in ("call_function", "call_method") and not node.users and changed_operand(node) is None:
        before = dict.fromkeys(node.all_input_nodes)
        node.graph.erase_node(node)
        for one in before:
            erase_dead_code(one)


@contextlib.contextmanager
def observe_side_effects() -> Iterator[TraceObservations]:
    """A context for tracing that yields its observations; at its end, prints and logs of the model are carried out."""
    from meshc.private import BuiltinVariable, LoggingLoggerVariable, SideEffects, TracingContext

    seen = TraceObservations()
    write, method, builtin = SideEffects.codegen_update_mutated, LoggingLoggerVariable.call_method, BuiltinVariable.call_function

    def account(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.changes = _changes(self)  # of the last attempt
        seen.code = tuple(dict.fromkeys(TracingContext.get_traced_code() or ()))
        seen.places, seen.constants, seen.without_place = read_guards(TracingContext.get().guards_context.dynamo_guards)
        return write(self, *args, **kwargs)

    def note_print(self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        _note(seen, tx, getattr(self.value, "__name__", "print"), self.value, args, kwargs)
        return _nothing()

    def note_log(self: Any, tx: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if name not in METHODS and name != "log":
            return method(self, tx, name, list(args), kwargs)
        if name == "log" or self.value.isEnabledFor(METHODS[name]):
            _note(seen, tx, f"{self.value.name}.{name}", getattr(self.value, name), args, kwargs)
        return _nothing()

    def call_builtin(self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        found = _text_of_tensors(tx, self.fn, args) if self.fn in TEXTS and not kwargs else None
        return builtin(self, tx, list(args), kwargs) if found is None else found

    with (
        torch._dynamo.config.patch(
            reorderable_logging_functions=torch._dynamo.config.reorderable_logging_functions | {*CALLS},
            skip_fwd_side_effects_in_bwd_under_checkpoint=True,  # those of a checkpointed region are reported like any other
        ),
        replace_targets(mutation_code=account, print_call=note_print, log_call=note_log, builtin_call=call_builtin),
        omit_checks(),
    ):
        try:
            yield seen
        finally:
            for attempt, _, _, call in seen.said:
                if attempt is seen.said[-1][0]:  # the last one
                    call()


def _nothing() -> Any:
    from meshc.private import variables

    return variables.ConstantVariable.create(None)


# ------------------------------------------------------------------------------------------------------------------------- changes


def _changes(account: Any) -> list[Source]:
    from meshc.private import AttributeMutationExisting, ValueMutationExisting, variables

    found: dict[Source, None] = {}
    for variable in account._get_modified_vars():
        if not isinstance(variable.mutation_type, AttributeMutationExisting | ValueMutationExisting) or variable.source is None:
            continue
        stored = account.store_attr_mutations.get(variable, {})
        same = [name for name, value in stored.items() if _is_so(variable, name, value)]
        changed = [name for name in stored if name not in same]
        if same and not changed:
            continue
        for stack in account.mutation_user_stacks.get(variable, ()):
            place = innermost(stack)
            if place is None or is_stock_file(place.file) or within_torchs_forward(stack):
                continue
            if isinstance(variable, variables.torch_function.TorchFunctionModeStackVariable) and is_torch(stack[-1].filename):
                continue  # entered and left by torch's own code, as where it builds a block mask
            if any(name in place.code for name in changed) or not any(name in place.code for name in same):
                found[place] = None
    return list(found)


def _is_so(variable: Any, name: str, value: Any) -> bool:
    """Whether an attribute is assigned the value that it already has."""
    before = getattr(getattr(variable, "value", None), "__dict__", {}).get(name, _is_so)
    if not value.is_python_constant():
        return False
    after = value.as_python_constant()
    return type(after) is type(before) and isinstance(after, bool | int | float | str | None) and after == before


# --------------------------------------------------------------------------------------------------------------- prints and logs


class _Placeholder:
    """A traced value in a text: its type, in whatever format."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def __format__(self, _: str) -> str:
        return self.text


def _note(seen: TraceObservations, tx: Any, name: str, call: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    place = innermost(torch._guards.TracingContext.extract_stack()) or Source()
    given, named = [_value(one) for one in args], {key: _value(one) for key, one in kwargs.items()}
    seen.said.append((tx.output, place, name, partial(_replay_call, call, given, named, place)))


def _replay_call(call: Function, args: list[Any], kwargs: dict[str, Any], place: Source) -> None:
    if call is print:
        print(*args, **kwargs)
    elif call is warnings.warn:
        text, category = (*args, kwargs.get("category"), None)[:2] if args else (kwargs.get("message"), kwargs.get("category"))
        warnings.warn_explicit(str(text), category if isinstance(category, type) else UserWarning, place.file, place.line)
    else:
        first = 1 if getattr(call, "__name__", "") == "log" else 0  # the level comes before the text
        call(*args[:first], "%s", _log_text(args[first:]), **{key: value for key, value in kwargs.items() if key != "stacklevel"})


def _log_text(args: Sequence[Any]) -> str:
    """`"%d of %s" % (...)`, where a traced value may be in the place of a number."""
    if len(args) < 2:
        return str(args[0]) if args else ""
    text, values = str(args[0]), tuple(args[1:])
    try:
        return text % values
    except TypeError:
        return PLACE.sub("%s", text) % values


def _text_of_tensors(tx: Any, function: Function, args: Sequence[Any]) -> Any:
    """`str(x)`, `"%s" % x`, `"..." + str(x)` as Dynamo's `"{}".format(x)`: a text with placeholders for tensors. None for any other
    call."""
    from meshc.private import StringFormatVariable, text_with_places, variables

    if function is operator.add:
        texts = any(isinstance(one, StringFormatVariable) for one in args)
        return text_with_places(tx, "{}{}", args) if texts else None
    args = [one.realize() for one in args]
    if function in (str, repr):
        return text_with_places(tx, "{}", args) if len(args) == 1 and isinstance(args[0], variables.TensorVariable) else None
    text, given = args
    values = given.items if isinstance(given, variables.BaseListVariable) else [given]
    if not text.is_python_constant() or not isinstance(text.as_python_constant(), str) or given.is_python_constant():
        return None
    pattern = text.as_python_constant().replace("{", "{{").replace("}", "}}")
    return text_with_places(tx, PLACE.sub("{}", pattern).replace("%%", "%"), values)


def _value(variable: Any) -> Any:
    """The Python value of a traced variable; a tensor is its type, as text."""
    from meshc.private import variables

    variable = variable.realize()
    if variable.is_python_constant():
        return variable.as_python_constant()
    if isinstance(variable, variables.TensorVariable):
        return _Placeholder(_tensor(variable.proxy.node.meta.get("example_value")))
    if isinstance(variable, variables.SymNodeVariable):
        return _Placeholder("a number")
    if isinstance(variable, variables.misc.StringFormatVariable):
        values = {key: _value(one) for key, one in variable.sym_kwargs.items()}
        return variable.format_string.format(*[_value(one) for one in variable.sym_args], **values)
    if isinstance(variable, variables.BaseListVariable):
        items = [_value(one) for one in variable.items]
        return tuple(items) if variable.python_type() is tuple else items
    if isinstance(variable, variables.ConstDictVariable):
        return {_value(key.vt): _value(one) for key, one in variable.items.items()}
    value = getattr(variable, "value", None)
    return value if value is not None else _Placeholder(f"a {variable.python_type_name()}")


def _tensor(value: Any) -> str:
    if not isinstance(value, Tensor):
        return "a tensor"
    return f"a tensor ({str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}])"
