"""Records of operators: what is known of one stands in one `Operator` of its family, from which all that asks is answered."""

from __future__ import annotations

import re
from collections import Counter
from math import inf
from pathlib import Path

import pytest
import torch

from meshc.check.guards import guard_function, is_guarded
from meshc.cost.flops import flops, is_attention, is_product
from meshc.passes.memory.policies import is_cheap, is_no_product
from meshc.rules import elementwise, every_family, in_any_order, operator_of, rule_of
from meshc.rules.contraction import product_flops
from meshc.rules.operator import EITHER, Deferral, Operator, declarations
from meshc.rules.partial import deferrals
from meshc.rules.preconditions import holds
from meshc.rules.rule import by_text
from meshc.testing.brute_force import Sample, build
from tests.rules.samples import f

LIBRARY = torch.library.Library("planted", "DEF")
LIBRARY.define("scaled_mm(Tensor x, Tensor w) -> Tensor")
LIBRARY.impl("scaled_mm", lambda x, w: (x @ w) * 2, "CompositeExplicitAutograd")
PLANTED = torch.ops.planted.scaled_mm.default

RECORD = Operator(
    by_text("m k, k n -> m n +k"),
    linear=EITHER,
    flops=product_flops,
    preconditions=(holds("w has two dims", lambda o: o["w"].dim() == 2),),
    cheap=True,
)


def test_one_record_answers_all_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """[5, 7] @ [7, 4], of an operator that no file of meshc names."""
    call = Sample(PLANTED, (f(5, 7), f(7, 4)))
    assert flops(build(call).node) == 0 and not is_guarded(PLANTED) and not is_cheap(build(call).node)
    monkeypatch.setitem(elementwise.OPERATORS, PLANTED, RECORD)
    one = build(call)
    rule = rule_of(one.node, list(one.node.all_input_nodes))
    assert rule is not None
    assert (rule.operands, rule.results, rule.sums) == ((("m", "k"), ("k", "n")), (("m", "n"),), ({"k": "sum"},))
    assert rule.linear == ((0,), (1,))
    assert Deferral((0,), "sum", "sum") in deferrals(one.node, rule)
    assert in_any_order(one.node, rule, "k"), "it has no lowering of its own"
    assert flops(one.node) == 2 * 5 * 7 * 4
    assert is_product(one.node) and not is_attention(one.node) and not is_no_product(one.node)
    assert is_cheap(one.node)
    assert is_guarded(PLANTED)
    with pytest.raises(ValueError, match="w has two dims"):
        guard_function(PLANTED, PLANTED)(torch.ones(2, 3), torch.ones(3))


def test_each_record_is_found_and_each_family_listed() -> None:
    """A family that is not imported yet is looked into for all but operators with the tag `pointwise`."""
    for family in every_family():
        for target, record in family.OPERATORS.items():
            assert operator_of(target) is record, (family.__name__, target)
    files = {path.stem for path in Path(elementwise.__file__).parent.glob("*.py") if "\nOPERATORS = " in path.read_text()}
    assert files == {family.__name__.rpartition(".")[2] for family in every_family()}


def test_every_operator_is_declared_by_one_family() -> None:
    declared = Counter(target for family in every_family() for target in family.OPERATORS)
    assert len(declared) > 500
    assert [str(target) for target, count in declared.items() if count > 1] == []
    assert all(isinstance(target, torch._ops.OpOverload) for target in declared)


def test_an_operator_that_is_declared_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="relu is declared twice"):
        declarations({"relu tanh": Operator(), "relu": Operator(cheap=True)})
    with pytest.raises(AttributeError, match="no_such_operator"):
        declarations({"no_such_operator": Operator()})


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("aten.mm.default", {"linear": EITHER, "any_order": False, "cheap": False}),
        ("aten.sum.dim_IntList", {"one_pass": True, "cheap": True, "any_order": True}),
        ("aten.where.self", {"linear": ((1, 2),), "joins": True, "pointwise": True, "rule": None}),
        ("aten.empty_like.default", {"uninitialised": True, "of_shape": ("",)}),
        ("aten.topk.default", {"place_along": True}),
        ("meshc.take.default", {"gathers": True, "ignores_outside": True}),
        ("meshc.attention.default", {"arithmetic": "attention"}),
        ("aten.sin.default", {"linear": (), "cheap": False, "rule": None}),
    ],
)
def test_facts_of_a_few(name: str, facts: dict[str, object]) -> None:
    space, packet, overload = re.split(r"\.", name)
    found = operator_of(getattr(getattr(getattr(torch.ops, space), packet), overload))
    assert {field: getattr(found, field) for field in facts} == facts


def test_a_maximum_passes_what_rises() -> None:
    one = build(Sample(torch.ops.aten.relu.default, (f(5),)))
    assert Deferral((0,), "max", "max") in deferrals(one.node, one.instance.rule)
    one = build(Sample(torch.ops.aten.mul.Scalar, (f(5), -2.0)))
    assert Deferral((0,), "max", "min") in deferrals(one.node, one.instance.rule), "it falls"
    one = build(Sample(torch.ops.aten.clamp.default, (f(5), -inf, 1.0)))
    assert Deferral((0,), "min", "min") in deferrals(one.node, one.instance.rule)
