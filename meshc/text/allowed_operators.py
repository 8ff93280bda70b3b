"""Allow-list of the operators that a program's text may name, with their names.

    aten.mm, aten.add.Tensor       an ATen operator; `.default` is left out, other overloads stand after a dot
    meshc.attention                one of meshc's own operators (registered by importing `meshc`)
    mylib.my_rmsnorm               an operator of a library that the reader has allowed (`libraries.py`)
    all_reduce, shard, ...         the functions of `meshc.ir.spmd`
    getitem                        one result of an operator that has several

`operators.txt` lists the first two kinds by name: the operators that the compiler can emit, and no others of these namespaces. So a text
cannot name operators that touch files, the process or the generator (programs draw by `meshc.random`), that read arbitrary memory
(`as_strided`, `_reshape_alias`, `set_`, `resize_`), that write into operands, or kernels that only other kernels call.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

import torch

from meshc.errors import ArtifactError
from meshc.ir import spmd
from meshc.ir.functions import Function, Target
from meshc.ir.schemas import arguments_by_name
from meshc.ops.implementations import register_operators
from meshc.private import OpOverload, OpOverloadPacket
from meshc.text import libraries

FUNCTIONS: Final[dict[str, Function]] = {**spmd.FUNCTIONS, "getitem": operator.getitem}
OPERATORS: Final = frozenset((Path(__file__).parent / "operators.txt").read_text(encoding="ascii").split())
"""Names of the ATen operators and of meshc's own that a program may hold."""

_NAME: Final = re.compile(r"([A-Za-z_]\w*)\.(\w+)(?:\.(\w+))?", re.ASCII)
LISTED: Final = f"listed are those that meshc compiles models to (meshc/text/operators.txt), {', '.join(sorted(FUNCTIONS))}"

_DRAWS: Final = "seed_step call p global_shape local_shape offsets causal scale window offset start first real"
EARLIER: Final = {
    "meshc.attention_block": ("meshc.attention", ""),
    "meshc.attention_block_backward": ("meshc.attention_backward", ""),
    "meshc.explicit_attention": ("meshc.attention", f"q k v bias {_DRAWS}"),
    "meshc.explicit_attention_backward": ("meshc.attention_backward", f"grad q k v bias out lse {_DRAWS}"),
    "meshc.explicit_attention_bias_backward": ("meshc.attention_bias_backward", f"grad q k v bias out lse {_DRAWS}"),
}
"""Operators of earlier versions, in programs that they saved -> the operator that does the same now, and the order in which the earlier one
took its arguments, where that was another."""


@cache
def refusal(target: Target) -> str | None:
    """Why a callable may not be named in a program's text, or None if it may; operators of a user's library have to be allowed first."""
    if not isinstance(target, OpOverload):
        return None if any(target is function for function in FUNCTIONS.values()) else "it is no operator"
    if spelling(target) in OPERATORS:
        return None
    schema = target._schema
    if torch.Tag.nondeterministic_seeded in target.tags or any("Generator" in str(argument.type) for argument in schema.arguments):
        return "it draws from torch's generator; programs draw by meshc.random"
    if target.namespace in libraries.OWN:
        return "saved programs do not hold it"
    if target.namespace in libraries.TORCHS:
        return f"operators of {target.namespace} are not listed"
    return "it writes into its operands" if schema.is_mutable else None


def spelling(target: Target) -> str:
    """The name of any callable, listed or not: `aten.mm`, `aten.add.Tensor`, `all_reduce`, `torch.nn.functional.linear`."""
    if isinstance(target, OpOverload):
        return str(target).removesuffix(".default")
    if isinstance(target, OpOverloadPacket):
        return str(target)
    for name, function in FUNCTIONS.items():
        if function is target:
            return name
    if isinstance(target, str):
        return target
    module = getattr(target, "__module__", None) or "builtins"
    return f"{module}.{getattr(target, '__qualname__', type(target).__qualname__)}"


@cache
def name_of(target: Target) -> str:
    """The name that `resolve` turns into `target`. Raises ArtifactError for a callable that is not listed."""
    why = refusal(target)
    if why is not None:
        raise ArtifactError(f"the operator {spelling(target)} is not on the allow-list: {why}; {LISTED}")
    return spelling(target)


def resolve(name: str) -> Function:
    """The operator of this name. Raises ArtifactError, with what is allowed, for a name that is not listed."""
    match = _NAME.fullmatch(name)
    if match is not None and not libraries.is_allowed(match[1]):
        if match[1] in libraries.TORCHS:
            raise ArtifactError(f"the operator {name} is not on the allow-list: operators of {match[1]} are not listed; {LISTED}")
        raise ArtifactError(libraries.forbidden(name))
    return _resolve_name(name)


@cache
def _resolve_name(name: str) -> Function:
    found = FUNCTIONS.get(name) or _overload(EARLIER.get(name, (name,))[0])
    why = "there is no such operator" if found is None else refusal(found)
    if found is None or why is not None:
        raise ArtifactError(f"the operator {name} is not on the allow-list: {why}; {LISTED}")
    return found


def reorder_arguments(name: str, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments of the operator of this name in the order in which the one that `resolve` finds takes them."""
    order = EARLIER.get(name, ("", ""))[1]
    if not order:
        return tuple(arguments)
    return tuple(arguments_by_name(cast(OpOverload, resolve(name)), (), dict(zip(order.split(), arguments, strict=False))).values())


def _overload(name: str) -> OpOverload | None:
    match = _NAME.fullmatch(name)
    if match is None or match[3] == "default":
        return None
    packet = getattr(getattr(torch.ops, match[1]), match[2], None)
    if packet is None and match[1] == "meshc":
        register_operators()
        packet = getattr(torch.ops.meshc, match[2], None)
    found = getattr(packet, match[3] or "default", None) if isinstance(packet, OpOverloadPacket) else None
    return found if isinstance(found, OpOverload) else None
