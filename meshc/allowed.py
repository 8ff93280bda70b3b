"""The operators that a program's text may name, and their names.

    aten.mm, aten.add.Tensor       an ATen operator; `.default` is left out, other overloads stand after a dot
    meshc.attention                one of meshc's own operators (registered by importing `meshc`)
    all_reduce, shard, ...         the functions of `meshc.spmd`
    getitem                        one result of an operator that has several

An ATen operator is on the list if its schema shows that it computes: operands are tensors, numbers, strings and constants, results are
tensors, nothing else. Off the list are those that touch files (`from_file`), the process, the generator (programs draw by `meshc.random`),
the storage behind a tensor (`set_`, `resize_`), and memory layouts that no rule speaks of (sparse, nested, quantized), whose operators
trust indices that nobody checked.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch._ops import OpOverload, OpOverloadPacket

from meshc import spmd
from meshc.errors import ArtifactError

NAMESPACES: Final = ("aten", "meshc")
FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {**spmd.FUNCTIONS, "getitem": operator.getitem}

_OPERANDS: Final = re.compile(r"(Optional\[|List\[)*(Tensor|int|float|bool|number|str|Device)\]*")
_RESULTS: Final = re.compile(r"(List\[)?Tensor\]?|int")
_IN_PLACE_LISTS: Final = re.compile(r"_(foreach|fused|amp_foreach)_\w*_")  # these return nothing: their work is the update
_REFUSED: Final = re.compile(
    r"from_file|_?data|_?resize\w*|_copy_from\w*|set_?|cuda|_?pin_memory|requires_grad_|_print\w*|_lazy_clone|_assert\w*|__(?!(and|or|xor|lshift|rshift)__)\w*|_test\w*"
    r"|_foobar|_fw_primal\w*|_(make|unpack)_dual\w*|_(add|remove)_batch_dim|_index_put_impl_?"
    r"|\w*(sparse|nested|jagged|mkldnn|miopen|vulkan|mps|cslt|_coo|coo_|csr|csc|bsr|bsc|coalesce|quantize)\w*"
    r"|q_\w+|fbgemm\w*|_wrapped\w*|_dyn_quant\w*|_cufft\w*|(_|c?col_|c?row_|crow_)?(indices|values)(_copy)?"
)
_QUANTIZED_BUT_DENSE: Final = re.compile(r"_?fake_quantize\w*")
# Their schemas name a generator, which they use only for a dropout that programs never ask of them.
_DRAWS_NOTHING: Final = re.compile(r"\w*attention\w*|gru|lstm|rnn_relu|rnn_tanh|_cudnn_rnn")

LISTED: Final = f"aten.* that computes on tensors, meshc.*, {', '.join(sorted(FUNCTIONS))}"


@cache
def refusal(target: Any) -> str | None:
    """Why a callable may not stand in a program's text, or None if it may."""
    if not isinstance(target, OpOverload):
        return None if any(target is function for function in FUNCTIONS.values()) else "it is no operator"
    if target.namespace == "meshc":
        return None
    if target.namespace != "aten":
        return f"operators of {target.namespace} are not listed"
    schema = target._schema
    name = schema.name.partition("::")[2]
    if torch.Tag.nondeterministic_seeded in target.tags or any("Generator" in str(argument.type) for argument in schema.arguments):
        if not _DRAWS_NOTHING.fullmatch(name):
            return "it draws from torch's generator; programs draw by meshc.random"
    if _REFUSED.fullmatch(name) and not _QUANTIZED_BUT_DENSE.fullmatch(name):
        return "it reaches past the values of dense tensors"
    if any(argument.is_out for argument in schema.arguments):
        return "it writes into operands given as out="
    for argument in schema.arguments:
        if not _OPERANDS.fullmatch(str(argument.type)) and argument.name != "generator":
            return f"its operand {argument.name} is a {argument.type}"
    if not schema.returns and _IN_PLACE_LISTS.fullmatch(name):
        return None
    results = [str(result.type) for result in schema.returns]
    if not any("Tensor" in result for result in results) or not all(map(_RESULTS.fullmatch, results)):
        return "it does not return tensors"
    return None


def spelling(target: Any) -> str:
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
def name_of(target: Any) -> str:
    """The name that `resolve` turns into `target`. Raises ArtifactError for a callable that is not listed."""
    why = refusal(target)
    if why is not None:
        raise ArtifactError(f"the operator {spelling(target)} is not on the allow-list: {why}; listed are {LISTED}")
    return spelling(target)


@cache
def resolve(name: str) -> Callable[..., Any]:
    """The operator of this name. Raises ArtifactError, with what is allowed, for a name that is not listed."""
    found = FUNCTIONS.get(name) or _overload(name)
    why = "there is no such operator" if found is None else refusal(found)
    if found is None or why is not None:
        raise ArtifactError(f"the operator {name} is not on the allow-list: {why}; listed are {LISTED}")
    return found


def _overload(name: str) -> OpOverload | None:
    namespace, _, rest = name.partition(".")
    packet_name, _, overload = rest.partition(".")
    if namespace not in NAMESPACES or not re.fullmatch(r"\w+", packet_name) or overload == "default":
        return None
    packet = getattr(getattr(torch.ops, namespace), packet_name, None)
    if not isinstance(packet, OpOverloadPacket) or not re.fullmatch(r"\w*", overload):
        return None
    found = getattr(packet, overload or "default", None)
    return found if isinstance(found, OpOverload) else None
