"""docs/plans.md: what its example prints and what its errors say is what is printed and said."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import meshc
from meshc.recipes import explain, resolve

PAGE = (Path(__file__).parents[2] / "docs" / "plans.md").read_text()


def test_the_table_of_a_plan_is_the_one_on_the_page() -> None:
    mesh = meshc.Mesh("dp=2,tp=4")
    table = explain(resolve("fsdp+megatron_sp", mesh) + meshc.Plan("pin lm_head.weight: vocab/tp, _"), mesh)
    assert textwrap.indent(table, "    ") in PAGE


def test_the_example_of_store_lines_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    _words()
    table = capsys.readouterr().out.split("\n\n")[1].split("\n", 1)[1]
    assert textwrap.indent(textwrap.dedent(table), "    ") in PAGE


def _words(plan: str | None = None) -> None:
    """Runs the page's example, under another plan if there is one."""
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "class Words" in block]
    if plan is not None:
        code = re.sub(r'plan=""".*?"""', lambda _: f"plan={plan!r}", code, flags=re.DOTALL)
    exec(compile(code, "docs/plans.md", "exec"), {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "meshc": meshc})


FAULTS: list[Callable[[], Any]] = [
    lambda: meshc.Plan("tp heads\n\ndp: batch; store param"),
    lambda: meshc.Plan("tpp: heads\npin a: ffn/tp, _\npin a: ffn!, _").check(meshc.Mesh("dp=2,tp=2")),
    lambda: _words("dp: batch\ntp: vocab\nstore head.weight: _, ffn/dp\nstore embed.weight: vocab/dp"),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_its_errors_are_those_that_are_raised(fault: Callable[[], Any]) -> None:
    """But for where the page breaks a line."""
    with pytest.raises(meshc.PlanError) as caught:
        fault()
    assert " ".join(str(caught.value).split()) in " ".join(PAGE.split())
