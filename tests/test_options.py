"""Options in groups: the earlier names give the same programs, with a note; what contradicts itself is refused as it was written; keys."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

import meshc
from meshc.options import GROUPS, NAMES
from tests import reference
from tests.models import mlp, nanogpt
from tests.one_trace import one_trace, patches_behind, traces  # noqa: F401
from tests.zoo.experts import shallow

OTHER: dict[str, Any] = {
    "seed": 3, "dynamic": {"x": {0: torch.export.Dim("batch", max=64)}}, "memory_budget": 10**9, "host_budget": 10**6, "remat": "cheap",
    "cache": "folder", "attention": "ring", "recurrence": "join", "pp_splits": ["down"], "schedule": "gpipe", "stages_per_rank": 2,
    "microbatches": 2, "optimizer_state": "8bit", "master_weights": True, "keep_gradients": True, "accumulate": True, "local_loss": "sum",
    "uneven_rows": True, "expert_bound": 1.5, "expert_dispatch": "flat", "expert_capacity": 1.25, "overflow": "pass", "expert_group": 8,
    "expert_priority": "weight", "expert_placement": "movable", "expert_copies": 1, "expert_bias_update": 0.001, "cuda_graph": False,
    "check_inputs": 0, "check_indices": False, "depth": "whole", "kept_sizes": 2,
}  # fmt: skip
"""Of each option a value that is not its default."""

BESIDE = {name: {"expert_capacity": 1.25} for name in ("overflow", "expert_group", "expert_priority")} | {
    "expert_copies": {"expert_placement": "movable"}
}
"""What an option does not go without."""


def grouped(**given: Any) -> meshc.Options:
    """The options with each value in its group, as somebody writes them now."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        group, field = NAMES.get(name, ("", ""))
        found = found | ({group: replace(found.get(group, GROUPS[group]()), **{field: value})} if group else {name: value})
    return meshc.Options(**found)


def flat(**given: Any) -> meshc.Options:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return meshc.Options(**given)


def compiled(options: meshc.Options, case: Any, mesh: str, **more: Any) -> meshc.Program:
    step = meshc.TrainStep(
        case.model, optimizer=torch.optim.SGD(case.model.parameters(), lr=0.1), loss=case.loss or (lambda output: output.loss), **more
    )
    return meshc.compile(step, meshc.Mesh(mesh), kwargs=case.call_kwargs, options=options)


def test_the_first_table_of_the_reference_has_twelve_rows_at_most() -> None:
    first = reference.PAGE.read_text().partition("## meshc.Options\n")[2].partition("\n```\n")[0].partition("-> None\n\n")[2]
    rows = re.findall(r"^(\w+)  +\S", first, re.M)
    assert rows == [field.name for field in dataclasses.fields(meshc.Options)] and len(rows) <= 12


def test_every_option_is_in_the_table_of_names_and_has_another_value_here() -> None:
    assert len(NAMES) == sum(len(dataclasses.fields(kind)) for kind in GROUPS.values()) == 26
    assert meshc.Options().by_name().keys() == OTHER.keys()
    assert [name for name, value in meshc.Options().by_name().items() if value == OTHER[name]] == []


def test_a_type_checker_takes_the_earlier_names_too() -> None:
    tree = ast.parse(inspect.getsource(meshc.Options))
    named = [one for block in ast.walk(tree) if isinstance(block, ast.If) for one in block.body if isinstance(one, ast.AnnAssign)]
    assert {ast.unparse(one.target) for one in named} == NAMES.keys()


@pytest.mark.parametrize("name", NAMES)
def test_an_earlier_name_sets_the_field_of_its_group_with_one_note(name: str) -> None:
    given = {**BESIDE.get(name, {}), name: OTHER[name]}
    with pytest.warns(DeprecationWarning) as notes:
        found = meshc.Options(**given)
    group, field = NAMES[name]
    assert found == grouped(**given) and getattr(getattr(found, group), field) == getattr(found, name) == OTHER[name]
    assert len(notes) == 1 and notes[0].filename == __file__ and f"{field}=..." in str(notes[0].message)


def test_the_note_says_what_to_write() -> None:
    with pytest.warns(DeprecationWarning) as notes:
        meshc.Options(seed=3, expert_capacity=1.25, overflow="pass", pp_splits=["down"])
    assert str(notes[0].message).startswith(
        "meshc.Options(expert_capacity=..., overflow=..., pp_splits=...) is "
        "meshc.Options(pipeline=meshc.Pipelining(splits=...), experts=meshc.Experts(capacity=..., overflow=...)) now"
    )


def test_options_in_groups_give_no_note() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = grouped(seed=3, expert_capacity=1.25)
        assert replace(found, remat="cheap").experts.capacity == 1.25


@pytest.mark.parametrize(
    ("mesh", "case", "given"),
    [
        ("dp=2", mlp, {"keep_gradients": True, "check_inputs": 0}),
        ("pp=2,dp=2", lambda: nanogpt(layers=2), {"schedule": "gpipe", "pp_splits": ["h.1"], "depth": "whole"}),
        ("ep=2", lambda: shallow("mixtral"), {"expert_capacity": 1.25, "overflow": "pass", "remat": "none"}),
    ],
    ids=["training", "pipeline", "experts"],
)
def test_either_spelling_is_the_same_program(mesh: str, case: Any, given: dict[str, Any]) -> None:
    microbatches = 2 if "pp" in mesh else None
    one, other, plain = (
        str(compiled(options, case(), mesh, microbatches=microbatches)) for options in (flat(**given), grouped(**given), meshc.Options())
    )
    assert one == other != plain


def test_one_option_given_twice_is_refused_unless_alike() -> None:
    experts = meshc.Experts(capacity=1.25)
    with pytest.raises(meshc.PlanError, match=r"expert_capacity=2.0, experts=Experts\(capacity=1.25\)\): one option, given twice"):
        flat(expert_capacity=2.0, experts=experts)
    assert flat(expert_capacity=1.25, experts=experts) == meshc.Options(experts=experts)
    assert flat(overflow="pass", experts=experts).experts == meshc.Experts(capacity=1.25, overflow="pass")


@pytest.mark.parametrize(
    ("given", "earlier", "now"),
    [
        ({"depth": "half"}, "Options(depth='half'): use", "Options(debugging=Debugging(depth='half')): use"),
        ({"stages_per_rank": 0}, "Options(stages_per_rank=0): at", "Options(pipeline=Pipelining(stages_per_rank=0)): at"),
        (
            {"expert_bound": 1.5, "expert_capacity": 1.25}, "leave expert_bound out", "leave Experts(bound=) out",
        ),
        ({"overflow": "pass"}, "do: Options(expert_capacity=1.25)", "do: Options(experts=Experts(capacity=1.25))"),
        ({"expert_copies": 1}, 'Options(expert_placement="movable", expert_copies=1)', 'Experts(placement="movable", copies=1))'),
        ({"pp_splits": "down"}, "Options(pp_splits='down'): give", "Options(pipeline=Pipelining(splits='down')): give"),
        (
            {"expert_bound": 1.5, "dynamic": OTHER["dynamic"]}, "Options(dynamic=..., expert_bound=...):",
            "Options(dynamic=..., experts=Experts(bound=...)):",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_contradicts_itself_is_refused_as_it_was_written(given: dict[str, Any], earlier: str, now: str) -> None:
    with pytest.raises(meshc.PlanError, match=re.escape(earlier)):
        flat(**given)
    with pytest.raises(meshc.PlanError, match=re.escape(now)):
        grouped(**given)


@pytest.mark.parametrize(
    ("given", "earlier", "now"),
    [
        ({"accumulate": True}, "Options(keep_gradients=, accumulate=) are", "Options(training=Training(keep_gradients=, accumulate=)) are"),
        ({"uneven_rows": True}, "Options(uneven_rows=True): each", "Options(local_inputs=LocalInputs(uneven_rows=True)): each"),
        ({"expert_bias_update": 0.1}, "Options(expert_bias_update=): r", "Options(experts=Experts(bias_update=)): r"),
    ],
    ids=["accumulate", "uneven_rows", "expert_bias_update"],
)
def test_what_does_not_go_with_a_module_is_refused_as_it_was_written(given: dict[str, Any], earlier: str, now: str) -> None:
    for options, said in ((flat(**given), earlier), (grouped(**given), now)):
        with pytest.raises(meshc.PlanError, match=re.escape(said)):
            meshc.compile(mlp().model, meshc.Mesh("dp=2"), options=options)


def test_every_option_but_the_folder_is_in_the_key_of_a_kept_program() -> None:
    program = compiled(meshc.Options(), mlp(), "dp=2")
    request = program.lowered.request
    job_key = importlib.import_module("meshc.api.job_key")
    key = job_key.key(request.options, {}, request)
    alike = [name for name, value in OTHER.items() if job_key.key(request.options, {}, request.having(**{name: value})) == key]
    assert alike == ["cache"]


def test_what_passes_try_is_an_option_or_a_field_by_its_name_and_is_not_refused() -> None:
    asked = {"memory_budget": 10**9, "host_budget": 10**6, "remat": "layer"}
    with pytest.raises(meshc.PlanError, match="nothing is weighed for a budget"):
        grouped(**asked)
    request = compiled(meshc.Options(), mlp(), "dp=2").lowered.request
    tried = request.having(**asked, schedule="1f1b", microbatches=4)
    assert (tried.options.host_room, tried.options.remat, tried.microbatches) == (10**6, "layer", 4)
    assert (tried.options.pipeline.schedule, request.options.pipeline.schedule) == ("1f1b", None)
    with pytest.raises(AttributeError, match="no attribute 'hots_budget'"):
        request.having(hots_budget=1)
