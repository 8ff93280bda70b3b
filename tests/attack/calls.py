"""A call as a loaded program makes it: its types checked without values, then its guard, then its kernel, on fenced operands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from meshc.check.guards import guard_function
from meshc.check.operators import PIECES, infer_result
from meshc.check.types import Wrong, check_extents
from meshc.errors import MeshcError
from meshc.ops.implementations import direct
from tests.attack.corpus import Call
from tests.attack.pages import Fenced

CPU = torch.device("cpu")
MOST_BYTES = 1 << 26
"""Of a result: what a program of that size would need is no attack."""
ORDINARY = (RuntimeError, ValueError, TypeError, LookupError, AssertionError, ArithmeticError, AttributeError, MemoryError, MeshcError)
"""What the runtime makes an ArtifactError of that names the line; anything else ends the process."""


def run(call: Call, fenced: Fenced, at_end: bool, checked: bool = True) -> str:
    """`refused`, `raised`, `made` or, if the result is not what was foretold, `other: ...`."""
    made: Any = None
    if checked:
        try:
            made = _foretold(call)
        except Wrong:
            return "refused"
    args, kwargs = pytree.tree_map(lambda leaf: fenced.tensor(leaf, at_end) if isinstance(leaf, Tensor) else leaf, (call.args, call.kwargs))
    function = direct(call.target, CPU)
    try:
        found = (guard_function(call.target, function) if checked else function)(*args, **kwargs)
    except ORDINARY:
        return "raised"
    return _compared(found, made) if checked else "made"


def _foretold(call: Call) -> Any:
    args, kwargs = pytree.tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (call.args, call.kwargs))
    try:
        count = PIECES[call.target](*args, **kwargs) if call.target in PIECES else 1
    except ORDINARY as error:
        raise Wrong(str(error)) from error
    if count > 4096:
        raise Wrong("too many results")
    made = infer_result(call.target, args, kwargs, count)
    for value in pytree.tree_leaves(made):
        if isinstance(value, Tensor):
            check_extents(tuple(value.shape), value.dtype.itemsize)
            if value.numel() * value.itemsize > MOST_BYTES:
                raise Wrong("large")
    return made


def _compared(found: Any, made: Any) -> str:
    mine, theirs = ([leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)] for value in (found, made))
    if [(tuple(one.shape), one.dtype) for one in mine] != [(tuple(one.shape), one.dtype) for one in theirs]:
        return f"other: {[(list(one.shape), one.dtype) for one in mine]} foretold {[(list(one.shape), one.dtype) for one in theirs]}"
    for value in mine:
        if value.numel() and value.layout == torch.strided:
            value.reshape(-1)[-1:].clone()  # what was made can be read
    return "made"
