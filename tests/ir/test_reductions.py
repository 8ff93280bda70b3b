"""A reduction is one record: a product over ranks, planted in the table, is run, typed, padded, deferred and accumulated by its record."""

# ruff: noqa: E501 - a line a case
from __future__ import annotations

import runpy
from dataclasses import replace
from typing import Final

import pytest
import torch
from torch.fx import Graph

from meshc import rules
from meshc.check import sharding_walk
from meshc.errors import ArtifactError
from meshc.ir import spmd
from meshc.ir.keys import AccumulationKind
from meshc.ir.mesh import Mesh
from meshc.ir.reductions import REDUCTIONS, Reduction
from meshc.ir.sharding import Part, Sharding
from meshc.program import accumulate
from meshc.program.program import Stage
from meshc.rules import reduction, statistics
from meshc.rules.operator import Operator
from meshc.runtime.simulator.simulate import run_stage
from meshc.testing.brute_force import Sample, prove
from meshc.testing.rank_tiles import assemble, tiles
from meshc.text.parse import parse_stage

aten = torch.ops.aten
PRODUCT: Final = Reduction(torch.mul, 1.0, False, "multiply", AccumulationKind("factor"), AccumulationKind("product"), torch.div)
TEXT = """@ranks("dp=2,tp=2")
def main(
    x: "f32[batch 5/tp, width 8]" = "input:x",
    s: "f32[batch 5/tp, width 8] partial(product: dp)" = "input:s",
    w: "f32[batch 6, width 8] partial(product: dp)" = "input:w",
):
    d: "int" = coordinate("tp")
    n: "int" = tile_count(5, [2], [d])
    LINES
    return {
        "output:x": x,
    }
"""


@pytest.fixture(autouse=True)
def product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reduction, and torch's `prod` as an operator that is partial by it where `meshc.rules.statistics` gathers."""
    plant(monkeypatch, PRODUCT)
    monkeypatch.setitem(statistics.OPERATORS, aten.prod.dim_int, Operator(reduction.reduction_rule("product")))


def plant(monkeypatch: pytest.MonkeyPatch, record: Reduction) -> None:
    monkeypatch.setitem(REDUCTIONS, "product", record)  # type: ignore[misc] # a dict, which is typed so that nobody writes to it


def told(*lines: str) -> list[str]:
    return [said for _, said in sharding_walk.faults(parse_stage(TEXT.replace("LINES", "\n    ".join(lines))), {"dp": 2, "tp": 2}, rules)]


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


REDUCED = 'y: "f32[batch 5/tp, width 8]" = all_reduce(s, ["dp"], "product")'
ONES = 'm: "f32[3, 8]" = mask(s, 0, n, 1.0)'
ZEROS = 'm: "f32[3, 8]" = mask(s, 0, n, 0.0)'
OF_MASKED = 'y: "f32[3, 8]" = all_reduce(m, ["dp"], "product")'
OVER_ROWS = 'z: "f32[width 8] partial(product: tp)" = aten.prod.dim_int(y, 0)'
CLAIM = 'y: "f32[batch 5/tp, width 8] pad(zero: 0.0)" = all_reduce(m, ["dp"], "product")'


def test_the_checker_lets_through_what_is_right() -> None:
    assert told(REDUCED) == []
    assert told(ONES, OF_MASKED, OVER_ROWS) == [], "a product of ones is one, which changes no product"
    assert told('y: "f32[batch 6/dp, width 8]" = reduce_scatter(w, ["dp"], 0, "product")') == []
    assert told('t: "f32[width 8, batch 5/tp] partial(product: dp)" = aten.t(s)') == [], "a view moves any entries"


@pytest.mark.parametrize(("lines", "why"), [
    ((REDUCED, OVER_ROWS), "it takes the padding of y in, which is [batch 5/tp] and holds anything there: mask it with 1.0"),
    ((ZEROS, OF_MASKED, OVER_ROWS), "it takes the padding of y in, which is [batch 5/tp] and holds anything there: mask it with 1.0"),
    ((ZEROS, CLAIM), "its type says that the padding of [batch 5/tp] is zero; as its line makes it, it holds anything"),
    ((REDUCED, 'z: "f32[batch 5/tp, width 8]" = all_reduce(y, ["dp"], "product")'), "its operand is not partial over dp for a product: it is partial over nothing"),
    (('y: "f32[batch 5/tp, width 8]" = all_reduce(s, ["dp"], "sum")',), "its operand is not partial over dp for a sum: it is partial(product: dp)"),
    (('y: "f32[batch 5/tp, width 8] partial(product: dp)" = aten.relu(s)',), "s is partial(product: dp), which aten.relu does not let through: a reduction must come first"),
])  # fmt: skip
def test_the_checker_refuses_what_is_wrong(lines: tuple[str, ...], why: str) -> None:
    (said,) = told(*lines)
    assert why in said, said


def test_by_an_idempotent_reduction_padding_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record's word alone decides: the claim that is refused of a product is believed of what is said to be idempotent."""
    assert told(ZEROS, CLAIM)
    plant(monkeypatch, replace(PRODUCT, idempotent=True))
    assert told(ZEROS, CLAIM) == []


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
        parse_stage(TEXT.replace("product: dp", "median: dp").replace("LINES", ""))
