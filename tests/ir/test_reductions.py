"""A reduction is one record: a product over ranks, planted in the table, is run, typed, padded, deferred and accumulated by its record."""

# ruff: noqa: E501 - a line a case
from __future__ import annotations

import runpy
from dataclasses import replace
from typing import Final

import pytest
import torch
from torch.fx import Graph

from meshc.errors import ArtifactError
from meshc.ir import spmd
from meshc.ir.keys import AccumulationKind
from meshc.ir.mesh import Mesh
from meshc.ir.reductions import REDUCTIONS, Reduction
from meshc.ir.sharding import Part, Sharding
from meshc.program import accumulate
from meshc.program.program import Stage
from meshc.proof.evaluate import Evaluator
from meshc.proof.exchanged_tiles import all_reduce
from meshc.proof.terms import TermTable
from meshc.proof.tiles import Tiles
from meshc.rules import reduction, statistics
from meshc.rules.operator import Operator
from meshc.runtime.simulator.simulate import run_stage
from meshc.testing.brute_force import Sample, prove
from meshc.testing.rank_tiles import assemble, tiles
from meshc.text.parse import parse_type

aten = torch.ops.aten
PRODUCT: Final = Reduction(torch.mul, 1.0, False, "multiply", AccumulationKind("factor"), AccumulationKind("product"), torch.div)

@pytest.fixture(autouse=True)
def product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reduction, and torch's `prod` as an operator that is partial by it where `meshc.rules.statistics` gathers."""
    plant(monkeypatch, PRODUCT)
    monkeypatch.setitem(statistics.OPERATORS, aten.prod.dim_int, Operator(reduction.reduction_rule("product")))


def plant(monkeypatch: pytest.MonkeyPatch, record: Reduction) -> None:
    monkeypatch.setitem(REDUCTIONS, "product", record)  # type: ignore[misc] # a dict, which is typed so that nobody writes to it


def all_reduced(terms: list[torch.Tensor], mesh: Mesh) -> list[list[float]]:
    graph = Graph()
    graph.output((graph.call_function(spmd.all_reduce, (graph.placeholder("x"), ["dp"], "product")),))
    found = run_stage(Stage("main", graph, (), ()), [[term] for term in terms], mesh, {axis.name: axis.size for axis in mesh.axes})
    return [row[0].tolist() for row in found]


def test_ranks_that_reduce_have_the_product() -> None:
    assert all_reduced([torch.tensor([1.0, 5.0]), torch.tensor([2.0, 3.0])], Mesh("dp=2")) == [[2.0, 15.0]] * 2
    mesh, whole, partial = Mesh("dp=3"), torch.tensor([6.0, 20.0]), Sharding(((Part("rows", 2),),), (("dp", "product"),))
    terms = tiles(whole, partial, mesh)
    assert not any(torch.allclose(term, whole) for term in terms), "each has a factor"
    torch.testing.assert_close(assemble(terms, partial, mesh), whole)
    torch.testing.assert_close(torch.tensor(all_reduced(terms, mesh)), whole.expand(3, 2))


def proved(how: str, *padding: tuple[str, float]) -> Tiles:
    """What is known of a sum of products once it is reduced, in a proof: rows over uneven tiles, with what is known of their padding."""
    terms = TermTable()
    root = terms.number("port", "input:s")
    x = Tiles(root, (((8, 3),), ((1, 8),)), (("tp", 24),), (("dp", "product"),), padding)
    return all_reduce(Evaluator(terms, {"dp": 2, "tp": 2}, {root}, {root: 40}), x, ["dp"], how)


def test_a_proof_takes_it_for_what_the_record_says(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced = proved("product", ("tp", 1.0))
    assert not reduced.partial and reduced.padding == (("tp", 1.0),), "a product of ones is one"
    assert proved("product", ("tp", 0.5)).padding == (), "of others it is another number"
    assert proved("sum").root != reduced.root, "the sum of a product's parts is no product"
    plant(monkeypatch, replace(PRODUCT, idempotent=True))
    assert proved("product", ("tp", 0.5)).padding == (("tp", 0.5),)


@pytest.mark.parametrize("wrong", [replace(PRODUCT, neutral=0.0), replace(PRODUCT, combine=torch.add)], ids=["padding", "function"])
def test_a_rule_by_it_is_proved_and_a_wrong_record_is_caught(monkeypatch: pytest.MonkeyPatch, wrong: Reduction) -> None:
    """Split in each way, uneven tiles among them, the product of the ranks' products is torch's."""
    sample = Sample(aten.prod.dim_int, (torch.rand(5, 7, dtype=torch.float64) + 0.5, 0))
    assert prove(sample) > 0
    plant(monkeypatch, wrong)
    with pytest.raises((AssertionError, RuntimeError)):
        prove(sample)


def test_views_are_proved_to_let_it_through() -> None:
    assert prove(Sample(aten.t.default, (torch.rand(4, 6, dtype=torch.float64) + 0.5,))) > 0


def test_parts_of_microbatches_have_its_keys_and_its_instruction() -> None:
    planted = runpy.run_path(accumulate.__file__)
    assert planted["whole_of"]("factor:y") == ("multiply", "product:y") and planted["is_added"]("factor:y")
    assert planted["ACCUMULATES"]["multiply"](torch.tensor(3.0), torch.tensor(4.0)) == 12
    assert accumulate.whole_of("factor:y") is None, "of the table as it is"
    assert [accumulate.whole_of(f"{kind}:y") for kind in ("part", "high", "low", "rows")] == [
        ("add", "sum:y"), ("max", "largest:y"), ("min", "smallest:y"), ("join", "joined:y"),
    ]  # fmt: skip


def test_a_type_names_reductions_of_the_table_only() -> None:
    with pytest.raises(ArtifactError, match="'median: dp' is not REDUCTION: AXIS, with a reduction of sum, max, min, product"):
        parse_type("f32[batch 6, width 8] partial(median: dp)", {"dp": 2})
