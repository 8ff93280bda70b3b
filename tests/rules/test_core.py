"""Core ATen is covered whole: every overload that torch tags `core` has a rule, or is one of the few that cannot have one."""

from __future__ import annotations

from typing import Any

import torch

from meshc.passes.trace.decompositions import decompositions
from meshc.rules import operator_of
from meshc.text.allowed_operators import refusal

aten = torch.ops.aten

WHOLE = {
    "aten._local_scalar_dense.default": "a tensor's number, as a number: programs hold tensors",
    "aten._pdist_forward.default": "the pairs of rows i < j are one dim, which no split of the rows cuts into tiles",
    "aten.as_strided.default": "it speaks of memory, and a program's values have no strides",
    "aten.masked_scatter.default": "which entry of the source goes where depends on the whole mask before it",
    "aten.nonzero.default": "its result's shape depends on data",
    "aten.sym_is_contiguous.default": "a shape's number, not a tensor",
    "aten.sym_numel.default": "a shape's number, not a tensor",
    "aten.sym_size.int": "a shape's number, not a tensor",
    "aten.sym_storage_offset.default": "a shape's number, not a tensor",
    "aten.sym_stride.int": "a shape's number, not a tensor",
}
"""Overloads that stay whole by their nature, and why."""


def overloads() -> list[Any]:
    """Every ATen overload."""
    found = []
    for name in sorted({schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")}):
        packet = getattr(aten, name.removeprefix("aten::"))
        found += [getattr(packet, overload) for overload in packet.overloads()]
    return found


def has_rule(op: Any) -> bool:
    return operator_of(op).rule is not None or operator_of(op).pointwise or torch.Tag.pointwise in op.tags


def reaches_rules(op: Any) -> bool:
    """Not so: what writes into its operands (functionalised before), what is taken apart before, and draws, which become meshc's own."""
    writes = op._schema.is_mutable or any(argument.is_out for argument in op._schema.arguments)
    draws = "torch's generator" in (refusal(op) or "")
    return not writes and not draws and op not in decompositions()


def test_every_core_overload_has_a_rule() -> None:
    core = [op for op in overloads() if torch.Tag.core in op.tags]
    assert len(core) > 150
    without = {str(op) for op in core if reaches_rules(op) and not has_rule(op)}
    assert without == set(WHOLE)
