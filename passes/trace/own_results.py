"""Clones, inserted into a torch-level graph, of call results that a reader changes in place.

    out = weighed(q, k, v);  out += x               becomes              out = weighed(q, k, v);  copy = out.clone();  copy += x

The operator may read its result again in backward, where the call that it replaces did not (a product needs its operands alone), and
torch's autograd refuses values that have changed since.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from meshc.frontend.in_place_changes import is_changed_later


def own_result(call: Node) -> None:
    """`call` is one that an operator of meshc's has replaced."""
    if not is_changed_later(call):
        return
    example = call.meta.get("example_value")
    plain = isinstance(example, torch.Tensor) and example.is_contiguous()  # a view of the one is to be a view of the other
    with call.graph.inserting_after(call):
        copy = call.graph.call_method("clone", (call,), {"memory_format": torch.contiguous_format} if plain else {})
    copy.meta.update(call.meta)
    call.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
