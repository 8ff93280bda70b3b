"""Assignments to `x.data` in a trace, as copies in place.

    key.data = key.data * m + query.data * (1 - m)          set_(key, y)          key.data.copy_(y)

On one device x shares the memory of y from there on, and earlier views of x keep the old memory. Where the trace shows neither, the copy
means the same; else the line is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from meshc.errors import CaptureError
from meshc.frontend.in_place_changes import is_changed_later
from meshc.frontend.inserted_calls import InsertedCalls
from meshc.ir.nodes import Source

_AUTOGRAD: Any = torch._C._autograd
DATA: Final = (_AUTOGRAD._get_data_attr, "detach", torch.detach)
"""Calls whose result shares the memory of their operand, without being a view for torch."""
COUNTED: Final = "_lower_version_count_by_1"
"""Dynamo's call after such a write, by which torch's version counter ignores it."""


def set_data_in_place(module: GraphModule, source_of: Callable[[Node], Source]) -> None:
    """Rewrite the assignments of a trace in place. Raises CaptureError."""
    setters = [node for node in module.graph.nodes if node.target is Tensor.set_ and len(node.args) == 2]
    if not setters:
        return
    written = InsertedCalls(module)
    for node in setters:
        x, y = node.args
        if (why := _shared(module, node, x, y)) is not None:
            raise CaptureError(
                f"the model sets the .data of a tensor, {why}\n  in your model: {source_of(node)}\n"
                "  why: the tensor has the memory of another from there on, and a program's tensors have each their own\n"
                "  what to do: write the values, as in x.data.copy_(y), in the place of x.data = y"
            )
        written._call(node, "copy_", written._call(node, DATA[0], x), y)
        node.replace_all_uses_with(x)
        for user in [user for user in x.users if getattr(user.target, "__name__", "") == COUNTED]:
            module.graph.erase_node(user)
        module.graph.erase_node(node)
    module.recompile()


def _shared(module: GraphModule, node: Node, x: Node, y: Node) -> None | str:
    """Why a copy would mean something else; None if it means the same."""
    held_there = getattr(module, str(x.target), None) if x.op == "get_attr" else None
    shape = x.meta["example_value"].shape  # that of the assigned value
    if isinstance(held_there, Tensor) and held_there.shape != shape:
        return f"of shape {list(held_there.shape)}, to one of shape {list(shape)}"
    behind = False
    later = set[Node]()
    for one in module.graph.nodes:
        behind = behind or one is node
        later |= {one} if behind else set()
    held = [one for one in module.graph.nodes if one.op in ("get_attr", "placeholder") and one is not x]
    if any(_memory(one) == _memory(y) for one in held if isinstance(one.meta.get("example_value"), Tensor)):
        return "to the memory of another tensor that it holds or is given"
    if is_changed_later(y) or any(user is not node and user in later for user in y.users):
        return "and goes on to use what it is set to"
    if any(user in later for view in _views(x) for user in view.users):
        return "and goes on to use a view of what it was"
    return None


def _views(x: Node) -> Iterator[Node]:
    value = x.meta["example_value"]
    for user in x.users:
        made = user.meta.get("example_value")
        if made is not value and isinstance(made, Tensor) and (user.target in DATA or made._base is value):
            yield user
            yield from _views(user)


def _memory(node: Node) -> int:
    return int(node.meta["example_value"].untyped_storage()._cdata)
