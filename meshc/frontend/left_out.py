"""What a model's Python does by tensors, and a program does not, left out while it is traced.

    if labels.max() >= self.config.vocab_size:                 a check: a warning names the line, as with an assert
        raise ValueError(f"Label values must be <= vocab_size: {self.config.vocab_size}")
    h.requires_grad = True                                     h.requires_grad_(): a leaf of the trace (`traced_gradients.py`)
    torch.mm(a, b, out=buffer[:, :6])                          a product, written over those columns: values of a program have no strides

Dynamo knows the `assert` of Python, and gives up at any other branch on a tensor. Its functions for conditional jumps are replaced
meanwhile: where one side of the jump only makes an error and raises it, and nobody is there to catch it, the other side is where the trace
goes on. That a value is to have a gradient stock models say for the checkpointing that torch had first (`enable_input_require_grads`, of
adapters).

Results that go into views of a larger tensor Dynamo takes as any others, and refuses only for the strides that they come to have: the
refusal is left out. What is written where is torch's functionalisation's to say, for every function with `out=`, and any view. So is
what Dynamo does before the backward of a function of autograd asks for strides (`tile.stride(0)`): it traces that anew, of gradients
that are made contiguous, and fails at one that is None.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final
from unittest import mock

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from meshc.frontend.known_outcomes import outcome

MOST: Final = 200
"""Instructions of a side that raises; longer ones are no checks."""
ELSEWHERE: Final = ("POP_JUMP", "JUMP", "RETURN", "YIELD", "FOR_ITER", "SEND", "RERAISE", "STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL")
"""How instructions begin that lead out of a row of them, or change what lasts."""

STRIDES: Final = "Attempted to call op with non-contiguous `out=`"
"""How Dynamo's refusal of a result that goes into a view begins."""

JUMP: Final = re.compile(r"POP_JUMP\w*_IF_(TRUE|FALSE)")
"""Jumps that depend on a truth and take it off the stack, whatever a release of Python calls them."""

Handler = Callable[[Any, Any], None]


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """A context for tracing. Checks are asserts in the graph."""
    from meshc.private import calls_of_torch, symbolic_convert

    base = symbolic_convert.InstructionTranslatorBase
    jumps = {getattr(base, name) for name in dir(base) if JUMP.fullmatch(name)}
    standing = {base.STORE_ATTR: _storing(base.STORE_ATTR), **{jump: _checking(jump) for jump in jumps}}
    tracers = (
        symbolic_convert.InstructionTranslator, symbolic_convert.InliningInstructionTranslator,
        symbolic_convert.InliningGeneratorInstructionTranslator,
    )  # fmt: skip
    before = [(tracer, tracer.dispatch_table) for tracer in tracers]
    try:
        for tracer, handlers in before:
            tracer.dispatch_table = [standing.get(handler, handler) for handler in handlers]
        with (
            mock.patch.object(calls_of_torch, "unimplemented", _but_for_strides(calls_of_torch.unimplemented)),
            torch._dynamo.config.patch(_autograd_backward_strict_mode_conditional_banned_ops=[]),
        ):
            yield
    finally:
        for tracer, handlers in before:
            tracer.dispatch_table = handlers


def _but_for_strides(refuse: Callable[..., None]) -> Callable[..., None]:
    """Dynamo's refusals of calls of torch's, without those of results for their strides."""

    def refuse_rest(*, gb_type: str, **kwargs: Any) -> None:
        if not gb_type.startswith(STRIDES):
            refuse(gb_type=gb_type, **kwargs)

    return refuse_rest


def _storing(handler: Handler) -> Handler:
    """Of what gives an object an attribute, one that sees what is asked for."""

    def store(self: Any, instruction: Any) -> None:
        if instruction.argval == "requires_grad" and _is_asked_for(*self.stack[-2:]):
            _, of = self.popn(2)
            of.realize().method_requires_grad_(self)
        else:
            handler(self, instruction)

    return store


def _is_asked_for(value: Any, of: Any) -> bool:
    """Whether it is True, of a tensor that is computed or given; parameters are the model's own."""
    from meshc.private import variables

    value, of = value.realize(), of.realize()
    if not value.is_python_constant() or value.as_python_constant() is not True or not isinstance(of, variables.TensorVariable):
        return False
    return not isinstance(of.as_proxy().node.meta.get("example_value"), torch.nn.Parameter)


def _checking(handler: Handler) -> Handler:
    """Of a conditional jump, one that sees whether it is a check, or settled."""
    from meshc.private import variables

    def jump(self: Any, instruction: Any) -> None:
        behind, there = self.instruction_pointer, self.indexof[instruction.target]
        value = self.stack[-1].realize()
        settled = outcome(value)
        if settled is not None:
            self.pop()
            self.push(variables.ConstantVariable.create(settled))
            handler(self, instruction)
            return
        check = _check_of(value)
        if check is None or not (_raises(self, behind) or _raises(self, there)):
            handler(self, instruction)
            return
        self.pop()
        self.output.create_proxy("call_function", check, (value.as_proxy(), "a check that raises"), {})
        if _raises(self, behind):
            self.jump(instruction)

    return jump


def _check_of(value: Any) -> Callable[..., None] | None:
    """What asserts it of a tensor of one element, or of what follows from a number that a tensor holds. None for anything else."""
    from meshc.private import variables

    if isinstance(value, variables.TensorVariable):
        example = value.as_proxy().node.meta.get("example_value")
        return torch._assert_async if isinstance(example, torch.Tensor) and example.numel() == 1 else None
    unknown = isinstance(value, variables.SymNodeVariable) and free_unbacked_symbols(value.sym_num)
    return torch.ops.aten._assert_scalar.default if unknown else None


def _raises(tracer: Any, start: int) -> bool:
    """Whether nothing comes from an instruction on but an error that is raised, and that nobody catches."""
    for instruction in tracer.instructions[start : start + MOST]:
        if instruction.opname == "RAISE_VARARGS":
            return not _is_caught(tracer, instruction)
        if instruction.opname.startswith(ELSEWHERE):
            return False
    return False


def _is_caught(tracer: Any, instruction: Any) -> bool:
    """By the function that is traced, or by one that has called it."""
    in_table = sys.version_info >= (3, 11)  # before, blocks are no table: what stands in one stays a branch
    if _has_except(tracer.instructions, instruction) if in_table else tracer.block_stack:
        return True
    parent = getattr(tracer, "parent", None)
    return parent is not None and _is_caught(parent, parent.current_instruction)


def _has_except(instructions: Sequence[Any], instruction: Any) -> bool:
    """Whether it stands in a `try`; a `with` is left by the error, and lets it through."""
    where = {id(one): index for index, one in enumerate(instructions)}
    entry = instruction.exn_tab_entry
    while entry is not None:
        index = where[id(entry.target)]
        names = [one.opname for one in instructions[index : index + 2]]
        if names[0] == "PUSH_EXC_INFO" and names[1] != "WITH_EXCEPT_START":
            return True
        entry = entry.target.exn_tab_entry
    return False
