"""Programs with open sizes are proved once for all that they serve; what rests on the sizes they were compiled with is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.export import Dim

import meshc
from meshc.errors import InputError
from meshc.ir.graph import copy_graph
from meshc.ir.sizes import Dynamic, Size, noted_relations, symbol
from meshc.proof.open_sizes import first_exception, served_sizes
from meshc.proof.program_proof import prove
from tests.golden.cases import CASES
from tests.proof.programs import FEATURES, open_step, open_windows


def test_one_proof_is_for_all_sizes() -> None:
    proof = CASES["mlp open sizes"]().prove()
    assert proof.holds and not proof.not_for_all and "at batch from 2 to 64, are" in str(proof)


def test_a_proof_is_for_the_sizes_that_are_asked_for() -> None:
    program = CASES["mlp open sizes"]()
    for batch in (2, 7, 64):
        proof = program.prove({"batch": batch})
        assert proof.holds and f"at batch {batch} (of 2 to 64)" in str(proof), str(proof)
    with pytest.raises(InputError, match="batch is 65"):
        program.prove({"batch": 65})


@pytest.mark.parametrize("name", [name for name in FEATURES if "open" in name])
def test_windows_rings_and_steps_are_proved_for_all_sizes(name: str) -> None:
    proof = FEATURES[name]().prove()
    assert proof.holds and not proof.not_for_all, str(proof)


@pytest.mark.parametrize("rows, length", [(2, 4), (3, 5), (40, 50), (7, 20)])
def test_windows_are_proved_at_each_size(rows: int, length: int) -> None:
    """Where a size divides, a rule may write less than for any size; what serves all serves it, too."""
    proof = open_windows().prove({"rows": rows, "length": length})
    assert proof.holds, str(proof)


def test_a_number_for_an_open_size_is_not_proved_though_it_is_that_of_the_size_it_was_compiled_with() -> None:
    made = open_step("dp=2,tp=2")()
    program, joint = made.general, made.lowered.joint
    stages = {name: replace(stage, graph=copy_graph(stage.graph)) for name, stage in program.stages.items()}
    node, at = next(
        (node, at) for stage in stages.values() for node in stage.graph.nodes for at, one in enumerate(node.args)
        if isinstance(one, list | tuple) and any(isinstance(x, Size) for x in one)
    )  # fmt: skip
    node.args = (*node.args[:at], [int(x) if isinstance(x, Size) else x for x in node.args[at]], *node.args[at + 1 :])
    proof = prove(replace(program, stages=stages), joint.as_stage(), joint.constants)
    assert node.name in proof.not_for_all or not proof.holds, str(proof)


def test_what_is_larger_is_looked_at_for_all_sizes() -> None:
    rows = Dynamic("rows", 2, 9, 7)
    n = symbol(rows)
    with noted_relations() as relations:
        assert n // 2 < 4 and n >= 2 and n * 3 > n and max(n, 1) is n
        assert n != 7 and (n - 7 or n % 7)  # that it is 7 says nothing of others
    served, is_all = served_sizes([rows], [])
    assert is_all and first_exception(relations, served) == "(n_rows // 2) < 4 does not hold at n_rows 8"
    served, _ = served_sizes([rows], ["n_rows != 8", "(n_rows % 9) != 0"])
    assert served["n_rows"].tolist() == [2, 3, 4, 5, 6, 7] and first_exception(relations, served) == ""


def test_of_too_many_sizes_some_are_looked_at() -> None:
    rows, length = Dynamic("rows", 2, 1 << 31, 7), Dynamic("length", 2, 4000, 11)
    served, is_all = served_sizes([rows, length], [])
    assert not is_all and {2, 1 << 31} <= set(served["n_rows"].tolist()) and {2, 4000} <= set(served["n_length"].tolist())
    with noted_relations() as relations:
        assert symbol(rows) * symbol(length) * (1 << 40) > 5
        assert (symbol(rows) * symbol(length) * (1 << 40) + 1) // ((1 << 38) + 1) > 5
    for relation in relations:
        assert "does not hold" in first_exception([relation], served), "numbers of 2 ** 82 on the way are not exact"


def test_a_program_that_no_range_bounds_says_how_many_sizes_were_looked_at() -> None:
    options = meshc.Options(dynamic={"input": {0: Dim("rows")}})
    with torch.no_grad():
        program = meshc.compile(torch.nn.Linear(4, 6), meshc.Mesh("dp=2"), args=(torch.randn(8, 4),), options=options)
    assert "of which 1,048,576 were looked at" in str(program.prove())
