"""Lines of a plan about memory: what backward recomputes, and what lies on the host."""

from __future__ import annotations

from meshc.ir.mesh import Mesh
from meshc.plan.plan import Plan
from meshc.plan.recipes import resolve


def test_what_backward_recomputes_is_said_in_lines() -> None:
    plan = Plan("remat *: cheap\ndp: batch\nkeep value:layers.*.mlp\nremat layers.3: none")
    assert str(plan) == "dp: batch\nremat *: cheap\nremat layers.3: none\nkeep value:layers.*.mlp"
    assert Plan(str(plan)) == plan and plan.remats[1].line == 4
    assert Plan({"remat": ["*: cheap", {"layers.3": "none"}], "keep": "value:layers.*.mlp", "dp": "batch"}) == plan
    assert plan.having(plan.axes) == plan and (plan + Plan("remat a: layer")).remats[2].policy == "layer"
    assert [plan.remats[1].covers(module) for module in ("layers.3", "layers.3.mlp", "layers.30", "layers")] == [True, True, False, False]


def test_what_lies_on_the_host_is_said_in_lines() -> None:
    plan = Plan("offload state\ndp: batch\noffload value:layers.*.mlp\noffload state lm_head.*\noffload layers.*")
    assert str(plan) == "dp: batch\noffload state\noffload value:layers.*.mlp\noffload state lm_head.*\noffload layers.*"
    assert Plan(str(plan)) == plan and plan.offloads[1].line == 3
    assert Plan({"offload": ["state", "value:layers.*.mlp", "state lm_head.*", "layers.*"], "dp": "batch"}) == plan
    assert plan.having(plan.axes) == plan and (plan + Plan("offload state a")).offloads[4].pattern == "a"
    assert [plan.offloads[2].names(name) for name in ("lm_head.weight", "norm.weight")] == [True, False]
    assert [plan.offloads[3].covers(module) for module in ("layers.3", "layers.3.mlp", "layers", "norm")] == [True, True, False, False]
    assert str(resolve("offload state", Mesh("dp=2"))) == "dp: batch\noffload state"
    assert str(Plan("offload state,update\noffload state , update  h.*")) == "offload state, update\noffload state, update h.*"
    assert str(Plan("offload params\noffload params h.*\noffload paramsets")) == "offload params\noffload params h.*\noffload paramsets"
