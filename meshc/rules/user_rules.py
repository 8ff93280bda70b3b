"""Sharding rules that users registered with `meshc.register_rule`, instantiated for one call.

A text has a part for each tensor in the operator's schema, in order. For a call, parts of tensors that are None are left out, and the part
of a list of tensors is repeated for each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from torch.fx import Node

from meshc.errors import CompileError, MeshcError
from meshc.ir import leaves, op_name, operands, records
from meshc.ops.registered import RULES
from meshc.private import OpOverload
from meshc.rules.rule import ALONE, ROLES, Local, Made, Rule, all_operands, einsum, shape_of

ADVICE: Final = "  what to do: docs/add-a-rule.md says how a rule is written; meshc.testing.prove_rule tries one on samples"


def registered_rule(node: Node, tensors: list[Node]) -> Rule | None:
    """The rule that a user registered for the node's operator, or None. Raises CompileError if the rule does not fit the shapes."""
    found = RULES.get(node.target)  # type: ignore[call-overload]
    if found is None:
        return None
    try:
        if isinstance(found.rule, str):
            made: object = einsum(text_for_call(found.rule, node), node, tensors, **found.fields)
        else:
            made = found.rule(node, tensors)
        rule = None if made is None else _with_positions(_check_rule(made, node, tensors))
    except MeshcError:
        raise
    except Exception as error:  # a rule written as a function is the user's code
        raise CompileError(
            f"the rule of {op_name(node)} does not fit this call: {error}\n  {_call_text(node, tensors)}\n{ADVICE}"
        ) from error
    if rule is None:
        return None
    return rule if rule.lower is None else replace(rule, lower=_with_error_context(rule.lower, node))


def _with_positions(rule: Rule) -> Rule:
    """The rule with `linear` given as "each" or "all" replaced by positions, past which reductions are then deferred."""
    said: object = rule.linear
    if not isinstance(said, str):
        return rule
    positions = {"": (), "each": ALONE, "all": all_operands(len(rule.operands))}[said]
    return replace(rule, linear=positions, defers=bool(positions))


def _with_error_context(lower: Callable[[Local], Made], node: Node) -> Callable[[Local], Made]:
    """A user's `lower`, whose exceptions become a CompileError that names the operator and the call."""

    def lower_with_context(local: Local) -> Made:
        try:
            return lower(local)
        except MeshcError:
            raise
        except Exception as error:
            why = f"the lower of {op_name(node)}'s rule raised {type(error).__name__}: {error}"
            raise CompileError(f"{why}\n  {_call_text(node, operands(node))}\n{ADVICE}") from error

    return lower_with_context


def tensor_arguments(op: OpOverload) -> list[tuple[str, str]]:
    """(name, "one", "optional" or "list") of the tensors that an operator takes, in the order of its schema."""
    kinds = {"Tensor": "one", "Optional[Tensor]": "optional", "List[Tensor]": "list", "List[Optional[Tensor]]": "list"}
    return [(a.name, kinds[str(a.type)]) for a in op._schema.arguments if str(a.type) in kinds]


def parts_of(text: str) -> tuple[list[str], list[str]]:
    """The parts of a rule's text: of operands, and of results."""
    left, _, right = text.partition("->")
    return [part.strip() for part in left.split(",")] if left.strip() else [], [part.strip() for part in right.split("|")]


def text_for_call(text: str, node: Node) -> str:
    """The text for one call: a part for each of its tensors, in the order in which the call names them."""
    op = node.target
    assert isinstance(op, OpOverload)
    operands, results = parts_of(text)
    part = {name: words for (name, _), words in zip(tensor_arguments(op), operands, strict=True)}
    named = [(argument.name, value) for argument, value in zip(op._schema.arguments, node.args, strict=False)]
    given = [name for name, value in (*named, *node.kwargs.items()) for leaf in leaves(value) if isinstance(leaf, Node)]
    return f"{', '.join(part[name] for name in given if name in part)} -> {' | '.join(results)}"


def _check_rule(made: object, node: Node, tensors: list[Node]) -> Rule:
    if not isinstance(made, Rule):
        raise ValueError(f"it returned {type(made).__name__}, no Rule")
    shapes = [shape_of(tensor) for tensor in tensors], [found.shape for found in records(node)]
    for what, dims, wanted in zip(("operands", "results"), (made.operands, made.results), shapes, strict=True):
        if [len(letters) for letters in dims] != [len(shape) for shape in wanted]:
            raise ValueError(f"it has letters for {what} of {[len(letters) for letters in dims]} dims")
    for letter, role in made.roles.items():
        if role not in ROLES:
            raise ValueError(f"its letter {letter} has the role {role!r}; roles are {', '.join(ROLES)}")
    return made


def _call_text(node: Node, tensors: list[Node]) -> str:
    shapes = ", ".join(str(list(shape_of(tensor))) for tensor in tensors)
    results = ", ".join(str(list(found.shape)) for found in records(node))
    source = records(node)[0].source
    return f"the call: operands {shapes or 'none'}, results {results}{f', at {source}' if source.file else ''}"
