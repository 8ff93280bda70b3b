"""Axes with more ranks than there are key-value heads: which are taken apart, into what, and which mesh is another one, taken apart."""

from __future__ import annotations

import pytest

from meshc.ir.mesh import Mesh
from meshc.plan.recipes import resolve
from meshc.plan.split_axes import parts_between, parts_by_group


@pytest.mark.parametrize("mesh, plan, shared, groups, wanted", [
    ("tp=4", None, [2, 2], [4, 4], "tp_kv_heads=2,tp_group=2"),
    ("tp=8", None, [2], [4], "tp_kv_heads=2,tp_group=4"),
    ("tp=6", None, [3], [2], "tp_kv_heads=3,tp_group=2"),
    ("dp=2,tp=4", "fsdp+megatron_sp", [2], [2], "tp_kv_heads=2,tp_group=2"),
    ("sp=4", None, [2], [2], "sp_kv_heads=2,sp_group=2"),
    ("cp=4", None, [2], [2], "cp_kv_heads=2,cp_group=2"),
    ("cp=4", None, [2], [4], ""),  # queries divide, and keys are gathered
    ("tp=2,cp=4", None, [4], [2], "cp_kv_heads=2,cp_group=2"),  # two heads are left
    ("a=4", "a: kv_heads, group", [2], [2], "a_kv_heads=2,a_group=2"),
    ("tp=4", "tp: heads, vocab\npin lm_head.weight: vocab/tp, _", [2], [2], "tp_kv_heads=2,tp_group=2"),
    ("tp=2", None, [2], [4], ""),  # as many as ranks
    ("tp=4", None, [8], [4], ""),  # more of them
    ("tp=4", None, [], [], ""),  # none is shared
    ("tp=4", None, [6], [2], ""),  # more than ranks, unevenly
    ("tp=6", None, [4], [3], ""),  # fewer, unevenly
    ("tp=8", None, [2], [2], ""),  # fewer heads of queries than ranks
    ("tp=4", None, [2, 4], [4, 2], ""),  # not the same in all layers
    ("tp=2,cp=4", None, [2], [4], ""),  # one head is left, and the queries of it
    ("tp=4", "tp: kv_heads, ffn", [2], [4], ""),  # the plan splits no queries
    ("tp=4", "tp: heads\npin k_proj.weight: kv_heads/tp, _", [2], [4], ""),  # it says what lies where
    ("tp=4", "tp: heads\npin op:o_proj: group/tp", [2], [4], ""),
    ("dp=4", "dp: heads", [2], [4], ""),  # another role goes by its name
    ("tp=4,tp_group=2", "tp: heads\ntp_group: -", [2], [4], ""),  # there is one already
])  # fmt: skip
def test_which_are_taken_apart(mesh: str, plan: str | None, shared: list[int], groups: list[int], wanted: str) -> None:
    given = Mesh(mesh)
    found = parts_by_group(resolve(plan, given), given, shared, groups)
    assert [",".join(map(str, parts)) for parts in found.values()] == ([wanted] if wanted else [])


@pytest.mark.parametrize("mesh, finer, wanted", [
    ("dp=2,tp=4", "dp=2,tp_kv_heads=2,tp_group=2", {"tp": "tp_kv_heads=2,tp_group=2"}),
    ("cp=8,tp=2", "cp_seq=2,cp_heads=4,tp=2", {"cp": "cp_seq=2,cp_heads=4"}),
    ("tp=4", "tp=4", {}),
    ("tp=4", "tp=2,dp=2", None),
    ("tp=4", "tp_kv_heads=2,tp_group=4", None),
    ("tp=4", "tp_kv_heads=2,tp_group=2,dp=2", None),
    ("tp=4", "dp=2,tp_kv_heads=2", None),
    ("tp=4", "tp_kv_heads=2,tp_group=2 ranks 1 0 2 3", None),
])  # fmt: skip
def test_which_axes_stand_for_which(mesh: str, finer: str, wanted: dict[str, str] | None) -> None:
    found = parts_between(Mesh(mesh), Mesh(finer))
    assert (found if found is None else {axis: ",".join(map(str, parts)) for axis, parts in found.items()}) == wanted
