"""Refusal of readers that index rows of movable experts' weights, which may be stored in another order than the model's.

    group_mm(rows, transpose(gate_up_proj), choices_to_slots(choice))      right, whatever the order
    gate_up_proj[0].norm()                                                 of another expert once they have moved: refused
"""

from __future__ import annotations

from typing import Final

import torch
from torch.fx import Node

from meshc.errors import CaptureError
from meshc.frontend.expert_placement import WEIGHTS, is_slots
from meshc.ir import op_name, records
from meshc.ops import expert_copies as _expert_copies  # noqa: F401 - registers meshc::copies_of
from meshc.passes.phases.traced_model import Joint
from meshc.passes.trace.count_experts import LAYOUT, PRODUCTS

aten, meshc = torch.ops.aten, torch.ops.meshc

ROW_BY_ROW: Final = (
    *LAYOUT, aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten._to_copy.default, aten.cat.default,
    meshc.by_group.default, meshc.in_line.default,
)  # fmt: skip
"""Operators that keep rows apart and in order."""
CLAMPED: Final = (aten.clamp.default, aten.clamp_min.default)


def refuse_other_readers(joint: Joint) -> None:
    """Raises CaptureError where weights of movable experts are read otherwise than by slot."""
    names = {f"{port.name.rpartition('.')[0]}.{each}" for port in joint.inputs if is_slots(port.name) for each in WEIGHTS}
    found = joint.placeholders()
    faults = []
    for name in sorted(names):
        node = found.get(f"parameter:{name.lstrip('.')}")
        for reader in [] if node is None else _row_readers(node):
            faults.append(f"{name}: {op_name(reader).removeprefix('aten.')} at {records(reader)[0].source or 'the model itself'}")
    if faults:
        raise CaptureError(
            'Options(experts=Experts(placement="movable")), and weights of experts that are read beside their layer\'s products:\n  '
            + "\n  ".join(faults[:4])
            + "\n  what to do: leave the option out, or what reads them"
        )


def _row_readers(weights: Node) -> list[Node]:
    """Readers that depend on the order of rows."""
    readers, found = [(weights, user) for user in weights.users], []
    while readers:
        read, user = readers.pop()
        if user.target is meshc.copies_of.default or (user.target in PRODUCTS and user.args[1] is read):
            continue
        if user.target in ROW_BY_ROW and (read is weights or read in user.all_input_nodes):
            readers += [(user, further) for further in user.users]
        elif not (user.target is aten.index.Tensor and user.args[0] is read and _by_slot(user)):
            found.append(user)
    return found


def _by_slot(user: Node) -> bool:
    """Whether an index comes from the slots of the experts that tokens chose."""
    indices = user.args[1]
    index = indices[0] if isinstance(indices, list | tuple) and len(indices) == 1 else None
    while isinstance(index, Node) and index.target in (*LAYOUT, *CLAMPED):
        index = index.args[0]
    return isinstance(index, Node) and index.target is meshc.choices_to_slots.default
