"""`meshc.register_rule`: sharding rules for operators that meshc does not know."""

from __future__ import annotations

from typing import Any, Final

from meshc.errors import CompileError
from meshc.ir.functions import Function, Target
from meshc.ops.registered import RULES, RegisteredRule, overload_of
from meshc.private import OpOverload
from meshc.rules import has_rule
from meshc.rules.rule import ROLES
from meshc.rules.user_rules import parts_of, tensor_arguments

CHOICES: Final = {"kind": ("compute", "layout", "carry"), "linear": ("", "each", "all")}
FIELDS: Final = (
    "kind", "linear", "roles", "lower", "neutral", "clean", "self_masked", "windows", "relations", "major", "settles", "shrinks",
    "accumulates",
)  # fmt: skip
"""Fields of a `Rule` that a text leaves open."""
PAGE: Final = "docs/add-a-rule.md says how a rule is written"


def register_rule(op: Target, rule: str | Function, **fields: Any) -> None:
    """Say how the dims of an operator's tensors relate, so that programs may split them.

        meshc.register_rule("mylib::my_rmsnorm", "... c!, c! -> ... c!")

    op      "mylib::my_op", `torch.ops.mylib.my_op`, or what `torch.library.custom_op` returned
    rule    a text with a part for each tensor of the operator's schema: letters for dims, `c!` whole, `+k` summed over; or a function
            `(node, tensors) -> Rule`
    fields  further fields of the `Rule` (`lower=`, `linear=`, `roles=`, `neutral=`, ...)

    Gradients are operators of their own, with rules of their own. An operator that torch's tag calls pointwise needs none. A rule counts
    for what is compiled after it, and the last one given to an operator stands; ranks must give the same.
    `meshc.testing.prove_rule` tries a rule on samples. Raises CompileError for what is no operator, or no rule for it.
    """
    known = overload_of(op)
    name = str(known).removesuffix(".default")
    if has_rule(known):
        raise CompileError(
            f"{name} has a rule of meshc's own, which no other may replace\n"
            "  what to do: if yours splits more, define an operator of your own that does the same, and register the rule for that"
        )
    if known._schema.is_mutable:
        raise CompileError(
            f"{name} writes into its operands, and a program's operators do not\n"
            "  what to do: register the form of it that returns new tensors, and call that in the model"
        )
    unknown = [field for field in fields if field not in FIELDS]
    if unknown:
        raise CompileError(f"the rule of {name}: {', '.join(unknown)} is no field of a rule; there are {', '.join(FIELDS)}: {PAGE}")
    for field, allowed in CHOICES.items():
        if field in fields and fields[field] not in allowed and not (field == "linear" and _are_positions(fields[field])):
            raise CompileError(f"the rule of {name}: {field}={fields[field]!r}; use {' or '.join(map(repr, allowed))}")
    if isinstance(rule, str):
        faults = list(_faults(rule, known, fields))
        if faults:
            listed = "\n    ".join(faults)
            raise CompileError(f"{rule!r} is no rule for {known._schema}:\n    {listed}\n  what to do: {PAGE}")
    elif not callable(rule):
        raise CompileError(f"the rule of {name} is of type {type(rule).__name__}, neither a text nor a function: {PAGE}")
    elif fields:
        raise CompileError(f"the rule of {name} is a function, which gives {', '.join(fields)} in the Rule that it returns")
    RULES[known] = RegisteredRule(rule, dict(fields))


def _faults(text: str, op: OpOverload, fields: dict[str, Any]) -> list[str]:
    """What is wrong with a text, whatever the shapes."""
    if text.count("->") != 1:
        return ["a rule is OPERANDS -> RESULTS"]
    operands, results = ([part.split() for part in side] for side in parts_of(text))
    taken = tensor_arguments(op)
    found = []
    if len(operands) != len(taken):
        said = f"it takes {len(taken)} tensors ({', '.join(name for name, _ in taken)})"
        found.append(f"{said}, the text has parts for {len(operands)}")
    given = [str(result.type) for result in op._schema.returns]
    if all(kind == "Tensor" for kind in given) and len(results) != len(given):
        found.append(f"it gives {len(given)} results, the text has {len(results)} (results are parted by |)")
    words = [word for part in (*operands, *results) for word in part]
    wrong = [word for word in words if not _is_word(word)]
    wrong += [word for part in operands for word in part if word.startswith("+")]
    found += [f"{word!r} is no letter: a, a!, +a (of a result), ... or _" for word in dict.fromkeys(wrong)]
    if found:
        return found
    found += [f"{' '.join(part)!r} has ... twice" for part in (*operands, *results) if part.count("...") > 1]
    ins, outs = ({word.strip("+!") for part in side for word in part} - {"_"} for side in (operands, results))
    whole = {word.strip("!") for word in words if word.endswith("!")}
    if "lower" not in fields:
        gone, new = sorted(ins - outs - whole), sorted(outs - ins - whole)
        found += [f"{letter} is in no result: if it is summed over, say +{letter} there; if it must be whole, {letter}!" for letter in gone]
        found += [f"{letter} is in no operand: say {letter}!, or give a lower that makes a tile of it" for letter in new]
    roles = fields.get("roles", {})
    found += [f"roles: {letter} is no letter of an operand" for letter in sorted(set(roles) - ins)]
    found += [f"roles: {role!r} of {letter} is none; there are {', '.join(ROLES)}" for letter, role in roles.items() if role not in ROLES]
    found += [f"+{letter} sums over what is in no operand" for letter in sorted({w[1:] for w in words if w[0] == "+"} - ins)]
    return found


def _are_positions(given: object) -> bool:
    """Whether it is sets of operands' positions: ((0,), (1,))."""
    return isinstance(given, tuple) and all(
        isinstance(positions, tuple) and positions and all(type(position) is int and position >= 0 for position in positions)
        for positions in given
    )


def _is_word(word: str) -> bool:
    bare = word.removeprefix("+")
    return bare == "..." or word == "_" or bare.removesuffix("!").isidentifier() and not (word != bare and bare.endswith("!"))
