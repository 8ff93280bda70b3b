"""Context for tracing through code at which Dynamo stops: branches that only raise an error, `requires_grad = True`, strides of `out=`.

    if labels.max() >= self.config.vocab_size:                 a check: a warning names the line, as with an assert
        raise ValueError(f"Label values must be <= vocab_size: {self.config.vocab_size}")
    h.requires_grad = True                                     h.requires_grad_(): a leaf of the trace (`traced_gradients.py`)
    torch.mm(a, b, out=buffer[:, :6])                          a product, written over those columns: values of a program have no strides

Dynamo traces Python's `assert`, and fails at any other branch on a tensor. Its functions for conditional jumps are replaced meanwhile:
where one side of the jump only builds an error and raises it, and nothing catches the error, the trace goes on with the other side.
`requires_grad = True` is what stock models set for torch's first (reentrant) checkpointing (`enable_input_require_grads`, of adapters).

Dynamo traces `out=` into a view of a larger tensor like any other, and refuses only the strides of the result: that refusal is left out,
since torch's functionalisation decides what is written where, for every function with `out=` and any view. Also left out is Dynamo's
reaction to strides that the backward of an autograd function reads (`tile.stride(0)`): it traces that backward again with contiguous
gradients, and fails at a gradient that is None.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from meshc.frontend.known_outcomes import outcome
from meshc.replacements import replace_targets

MOST: Final = 200
"""Most instructions of a side that raises; longer ones are no checks."""
ELSEWHERE: Final = ("POP_JUMP", "JUMP", "RETURN", "YIELD", "FOR_ITER", "SEND", "RERAISE", "STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL")
"""Prefixes of instructions that jump, return, or have lasting effects."""

STRIDES: Final = "Attempted to call op with non-contiguous `out=`"
"""The first words of Dynamo's refusal of `out=` into a view."""

JUMP: Final = re.compile(r"POP_JUMP\w*_IF_(TRUE|FALSE)")
"""Conditional jumps that pop their condition, in any release of Python."""

Handler = Callable[[Any, Any], None]


@contextlib.contextmanager
def omit_checks() -> Iterator[None]:
    """A context for tracing, in which checks become asserts of the graph."""
    from meshc.private import calls_of_torch, symbolic_convert

    base, refuse = symbolic_convert.InstructionTranslatorBase, calls_of_torch.unimplemented

    def refuse_all_but_strides(*, gb_type: str, **kwargs: Any) -> None:
        if not gb_type.startswith(STRIDES):
            refuse(gb_type=gb_type, **kwargs)

    jumps = {getattr(base, name) for name in dir(base) if JUMP.fullmatch(name)}
    standing = {base.STORE_ATTR: _store_handler(base.STORE_ATTR), **{jump: _jump_handler(jump) for jump in jumps}}
    main, inlined, generator = (
        [standing.get(handler, handler) for handler in tracer.dispatch_table]
        for tracer in (
            symbolic_convert.InstructionTranslator, symbolic_convert.InliningInstructionTranslator,
            symbolic_convert.InliningGeneratorInstructionTranslator,
        )
    )  # fmt: skip
    with (
        replace_targets(main_instructions=main, inlined_instructions=inlined, generator_instructions=generator),
        replace_targets(torch_refusals=refuse_all_but_strides),
        torch._dynamo.config.patch(_autograd_backward_strict_mode_conditional_banned_ops=[]),
    ):
        yield


def _store_handler(handler: Handler) -> Handler:
    """`STORE_ATTR` that turns `x.requires_grad = True` into `x.requires_grad_()`."""

    def store(self: Any, instruction: Any) -> None:
        if instruction.argval == "requires_grad" and _is_asked_for(*self.stack[-2:]):
            _, of = self.popn(2)
            of.realize().method_requires_grad_(self)
        else:
            handler(self, instruction)

    return store


def _is_asked_for(value: Any, of: Any) -> bool:
    """Whether `value` is True and `of` a tensor that is computed or an input; parameters have the model's own flags."""
    from meshc.private import variables

    value, of = value.realize(), of.realize()
    if not value.is_python_constant() or value.as_python_constant() is not True or not isinstance(of, variables.TensorVariable):
        return False
    return not isinstance(of.as_proxy().node.meta.get("example_value"), torch.nn.Parameter)


def _jump_handler(handler: Handler) -> Handler:
    """A conditional jump that recognises checks and known outcomes."""
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
    """The assertion function for a condition: of a tensor of one element, or of a number that a tensor holds. None for any other
    condition."""
    from meshc.private import variables

    if isinstance(value, variables.TensorVariable):
        example = value.as_proxy().node.meta.get("example_value")
        return torch._assert_async if isinstance(example, torch.Tensor) and example.numel() == 1 else None
    unknown = isinstance(value, variables.SymNodeVariable) and free_unbacked_symbols(value.sym_num)
    return torch.ops.aten._assert_scalar.default if unknown else None


def _raises(tracer: Any, start: int) -> bool:
    """Whether the instructions from `start` on only raise an error that nothing catches."""
    for instruction in tracer.instructions[start : start + MOST]:
        if instruction.opname == "RAISE_VARARGS":
            return not _is_caught(tracer, instruction)
        if instruction.opname.startswith(ELSEWHERE):
            return False
    return False


def _is_caught(tracer: Any, instruction: Any) -> bool:
    """Whether the traced function, or a caller of it, catches the error."""
    in_table = sys.version_info >= (3, 11)  # before 3.11 there is no exception table: a check inside any block stays a branch
    if _has_except(tracer.instructions, instruction) if in_table else tracer.block_stack:
        return True
    parent = getattr(tracer, "parent", None)
    return parent is not None and _is_caught(parent, parent.current_instruction)


def _has_except(instructions: Sequence[Any], instruction: Any) -> bool:
    """Whether the instruction is inside a `try`; a `with` lets the error through."""
    where = {id(one): index for index, one in enumerate(instructions)}
    entry = instruction.exn_tab_entry
    while entry is not None:
        index = where[id(entry.target)]
        names = [one.opname for one in instructions[index : index + 2]]
        if names[0] == "PUSH_EXC_INFO" and names[1] != "WITH_EXCEPT_START":
            return True
        entry = entry.target.exn_tab_entry
    return False
