"""Halves: the backward of a stage as what other stages wait for, and the rest.

    g = mm(grad, w.t)        I: its result goes on to the stage before, or to further layers of this one
    gw = mm(x.t, grad)       W: nothing but the gradient of one weight comes of it

Zero-bubble schedules run W whenever a rank would idle (Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from torch.fx import Node

from meshc.ir import is_getitem
from meshc.passes.stages.homes import BACKWARD, Home, Kinds

WEIGHTS: Final = "W"


def split_backward(found: Kinds, placed: Mapping[Node, Home], parts: Collection[Node], stages: Collection[int]) -> dict[Node, Home]:
    """Homes with the operators of the backward of `stages` in two halves. `parts` are the gradients, microbatch by microbatch."""
    made = dict(placed)
    weight: dict[Node, Node | None] = {}  # the one gradient that comes of a value; none if it is more than that
    for node in reversed(found.backward):
        home = placed[node]
        own = [user for user in node.users if user in weight and placed[user] == home]
        gradients = {weight[user] for user in own} | ({node} if node in parts else set())
        alone = len(gradients) == 1 and not any(user in placed and placed[user] != home for user in node.users)
        weight[node] = next(iter(gradients)) if alone else None
        if weight[node] is not None and home.stage in stages and home.half == BACKWARD:
            made[node] = Home(home.stage, WEIGHTS)
    for node in found.backward:
        if is_getitem(node):
            made[node] = made[node.args[0]]  # type: ignore[index]
    return made
