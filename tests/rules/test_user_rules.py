"""Rules that users register: what is refused, what is proved, and programs with their operators."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

import meshc
from meshc.ops import registered
from meshc.report import summary
from meshc.rules.rule import Local, Rule, einsum
from meshc.testing import prove_rule
from tests.rules.own import imported

aten = torch.ops.aten
mylib = imported("mylib")
NORM = "mylib::my_rmsnorm"


@torch.library.custom_op("testlib::halves", mutates_args=())
def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x / 2, x * 2


@torch.library.custom_op("testlib::scaled_sum", mutates_args=())
def scaled_sum(tensors: list[Tensor], scale: Tensor | None, bias: Tensor) -> Tensor:
    total = torch.stack(tensors).sum(0)
    return (total if scale is None else total * scale) + bias


@torch.library.custom_op("testlib::write", mutates_args=("x",))
def write(x: Tensor) -> None:
    x.zero_()


@torch.library.custom_op("testlib::project", mutates_args=())
def project(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


@halves.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@scaled_sum.register_fake
def _(tensors: list[Tensor], scale: Tensor | None, bias: Tensor) -> Tensor:
    return torch.empty_like(tensors[0])


@project.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = dict(registered.RULES)
    yield
    registered.RULES.clear()
    registered.RULES.update(before)


def f(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize(
    "op, rule, fields, said",
    [
        ("mylib::nothing", "a -> a", {}, "import the library that defines it"),
        ("my_rmsnorm", "a -> a", {}, "NAMESPACE::NAME"),
        (len, "a -> a", {}, "is no operator"),
        ("aten::mm", "m k, k n -> m n +k", {}, "has a rule of meshc's own"),
        ("aten::bitwise_and", "a -> a", {}, "has the overloads"),
        ("testlib::write", "a -> a", {}, "writes into its operands"),
        (NORM, "... c -> ... c", {}, "it takes 2 tensors (x, weight), the text has parts for 1"),
        ("testlib::halves", "a -> a", {}, "it gives 2 results, the text has 1"),
        (NORM, "... c, c, ... c", {}, "OPERANDS -> RESULTS"),
        (NORM, "... c, c -> ...", {}, "c is in no result: if it is summed over, say +c"),
        (NORM, "... c!, c -> ... c d", {}, "d is in no operand"),
        (NORM, "... c!, c -> ... c +e", {}, "+e sums over what is in no operand"),
        (NORM, "... 2c, +c -> ... c", {}, "'2c' is no letter"),
        (NORM, "... c!, c -> ... c", {"liner": "each"}, "liner is no field of a rule"),
        (NORM, "... c!, c -> ... c", {"linear": "both"}, "linear='both'; use"),
        (NORM, "... c!, c -> ... c", {"roles": {"z": "hidden"}}, "roles: z is no letter of an operand"),
        (NORM, "... c!, c -> ... c", {"roles": {"c": "channels"}}, "roles: 'channels' of c is none; there are contracts, makes,"),
        (NORM, 3, {}, "neither a text nor a function"),
        (NORM, lambda node, tensors: None, {"linear": "each"}, "gives linear in the Rule"),
    ],
)  # fmt: skip
def test_what_is_no_rule_is_refused(op: Any, rule: Any, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(meshc.CompileError) as found:
        meshc.register_rule(op, rule, **fields)
    assert said in str(found.value)


@pytest.mark.parametrize("op", [NORM, "mylib::my_rmsnorm.default", torch.ops.mylib.my_rmsnorm, mylib.my_rmsnorm])
def test_an_operator_may_be_named_in_any_of_torchs_ways(op: Any) -> None:
    meshc.register_rule(op, "... c!, c! -> ... c!")
    assert registered.RULES[torch.ops.mylib.my_rmsnorm.default].rule == "... c!, c! -> ... c!"


def test_right_rules_are_proved_and_say_what_was_split() -> None:
    x, weight = f(5, 3, 7), f(7)
    proof = prove_rule(NORM, [(x, weight), (x[0], weight)])
    assert proof.letters == ("*0", "*1")
    assert f"    {proof}\n" in (Path(__file__).parents[2] / "docs" / "add-a-rule.md").read_text()
    assert prove_rule("mylib::my_rmsnorm_backward", [(x, x + 1, weight)]).letters == ("+*0", "+*1")
    assert prove_rule("mylib::my_gate", [(x,)]).splits > 10, "torch's tag is enough"
    numbers = torch.tensor(0.1), torch.tensor(0.9)
    assert prove_rule("mylib::my_update", [(x, x + 1, x - 1, *numbers)]).splits > 10
    assert "split were m, +k, n" in str(prove_rule("aten::mm", [(f(5, 4), f(4, 7))]))


def test_what_letters_are_to_a_model_gives_names_to_a_users_own_product() -> None:
    """`tp: ffn` finds the layer between two products of a library, as it does between torch's."""
    meshc.register_rule("testlib::project", "... k, n k -> ... n +k", linear=((0,), (1,)), roles={"k": "contracts", "n": "makes"})
    assert prove_rule("testlib::project", [(f(5, 7), f(4, 7))]).letters == ("*0", "+k", "n")
    model = Projected()
    program = meshc.compile(model, meshc.Mesh("tp=2"), args=(torch.randn(4, 6),), plan="tp: ffn")
    assert "ffn 8/tp" in str(program)
    meshc.verify(program, (torch.randn(4, 6),))


class Projected(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Parameter(torch.randn(8, 6)), torch.nn.Parameter(torch.randn(6, 8))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = torch.ops.testlib.project(x, self.up).relu()
        return torch.ops.testlib.project(hidden, self.down)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"roles": {"m": "contracts"}}, "m has the role 'contracts'.*a result has it"),
        ({"roles": {"n": "makes"}}, "n has the role 'makes'.*no letter has the role 'contracts'"),
        ({"roles": {"m": "multiplies"}}, "it is not in two operands and a result"),
        ({"roles": {"m": "weighs"}}, "a result does not add up to one along it"),
        ({"linear": "all"}, "partial: Deferral"),
    ],
)
def test_a_rule_that_says_what_its_operator_is_not_is_found(fields: dict[str, Any], said: str) -> None:
    meshc.register_rule("testlib::project", "m k, n k -> m n +k", **fields)
    with pytest.raises(meshc.VerifyError, match=rf"(?s)rule of testlib.project is wrong, sample 0: .*{said}"):
        prove_rule("testlib::project", [(f(5, 7), f(4, 7))])


def test_wrong_rules_are_found() -> None:
    meshc.register_rule(NORM, "... c, c -> ... c")
    with pytest.raises(meshc.VerifyError, match=r"(?s)rule of mylib.my_rmsnorm is wrong, sample 0: .* with c.0: a split.*what to do"):
        prove_rule(NORM, [(f(5, 7), f(7))])
    meshc.register_rule("mylib::my_rmsnorm_backward", "... c!, ... c, c -> ... c | c")
    with pytest.raises(meshc.VerifyError, match=r"with \*0.0: a split"):
        prove_rule("mylib::my_rmsnorm_backward", [(f(5, 7), f(5, 7), f(7))])


def test_what_cannot_be_proved_says_so() -> None:
    for op, samples, said in (
        ("testlib::halves", [(f(5),)], "has no rule"), (NORM, [], "there are no samples"), (NORM, [f(5)], "a sample is a tuple"),
    ):  # fmt: skip
        with pytest.raises(meshc.CompileError, match=said):
            prove_rule(op, samples)


def test_a_part_is_left_out_for_none_and_stands_for_each_of_a_list() -> None:
    meshc.register_rule("testlib::scaled_sum", "a b, b, a b -> a b")
    x, scale = f(5, 7), f(7)
    assert prove_rule("testlib::scaled_sum", [([x, x + 1, x], scale, x), ([x], None, x), ([x], {"bias": x, "scale": scale})]).splits > 30


def test_lower_may_return_a_tuple_or_a_list() -> None:
    def _halves(local: Local) -> tuple[Node, Node]:
        (x,) = local.operands
        made = local.call(x)
        return local.item(made, 0), local.item(made, 1)

    for lower in (_halves, lambda local: list(_halves(local))):
        meshc.register_rule("testlib::halves", "a b -> a b | a b", lower=lower)
        assert prove_rule("testlib::halves", [(f(5, 7),)]).splits > 5


def test_a_lower_that_fails_is_named() -> None:
    meshc.register_rule("testlib::halves", "a -> a | a", lower=lambda local: (local.operands[0],))
    with pytest.raises(meshc.CompileError, match="rule of testlib.halves: its lower gave 1 values, the operator has 2 results"):
        prove_rule("testlib::halves", [(f(5),)])
    meshc.register_rule("testlib::halves", "a -> a | a", lower=lambda local: local.operands[1])
    with pytest.raises(meshc.CompileError, match=r"lower of testlib.halves's rule raised IndexError.*\n.*operands \[5\]"):
        prove_rule("testlib::halves", [(f(5),)])


def test_a_text_that_does_not_fit_a_call_says_which() -> None:
    meshc.register_rule(NORM, "a c!, c -> a c")
    with pytest.raises(meshc.CompileError, match=r"(?s)rule of mylib.my_rmsnorm does not fit this call.*operands \[2, 5, 7\], \[7\]"):
        prove_rule(NORM, [(f(2, 5, 7), f(7))])


def split_rows(local: Local) -> Node:
    """Rows that are split: the mean of squares is summed over the ranks that share them."""
    x, weight = local.operands
    if not local.axes("c"):
        return local.call(x, weight)
    x = local.neutralise(x, "c", 0.0)
    squares = local.emit(aten.sum.dim_IntList, local.emit(aten.mul.Tensor, x, x), [-1], True)
    mean = local.emit(aten.mul.Tensor, local.all_reduce(squares, local.axes("c"), "sum"), 1 / local.global_size("c"))
    scale = local.emit(aten.rsqrt.default, local.emit(aten.add.Tensor, mean, mylib.EPS))
    return local.emit(aten.mul.Tensor, local.emit(aten.mul.Tensor, x, scale), weight)


def test_a_lower_splits_what_the_operator_needs_whole() -> None:
    meshc.register_rule(NORM, "... c, c -> ... c", lower=split_rows)
    assert prove_rule(NORM, [(f(5, 7), f(7))]).letters == ("*0", "c")


def test_a_rule_may_be_a_function() -> None:
    def rows(node: Node, tensors: list[Node]) -> Rule:
        return einsum("a c!, c -> a c", node, tensors)

    meshc.register_rule(NORM, rows)
    assert prove_rule(NORM, [(f(5, 7), f(7))]).letters == ("a",)


def test_ranks_compare_what_was_registered() -> None:
    found = registered.by_name()
    assert found["mylib.my_rmsnorm.default"] == ("... c!, c -> ... c", {})


def test_a_step_of_own_operators_is_split_and_equal_to_one_device() -> None:
    step, args, kwargs = imported("train").build()
    program = meshc.compile(step, meshc.Mesh("dp=2,tp=2"), args=args, kwargs=kwargs, plan="dp: batch; store params, state\ntp: ffn")
    assert not [note for note in program.compiled.notes if "has no rule" in note]
    uses = summary.collectives(program.compiled)
    assert not [use for use in uses if use.phase == "backward" and use.kind == "all_gather" and "dp" in use.axes and "x" in use.reason]
    assert any("mylib.my_rmsnorm" in use.reason for use in uses), "reasons name the user's operator"
    assert all(port.sharding.split_axes() for port in program.compiled.inputs if port.kind == "state" and len(port.shape) == 2)
    meshc.verify(program)


def test_what_has_no_rule_is_named_with_its_place_and_an_update_has_none_in_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for op in (torch.ops.mylib.my_rmsnorm.default, torch.ops.mylib.my_update.default):
        monkeypatch.delitem(registered.RULES, op)
    step, args, kwargs = imported("train").build()
    program = meshc.compile(step, meshc.Mesh("dp=2"), args=args, kwargs=kwargs)
    notes = [note for note in program.compiled.notes if "has no rule" in note]
    assert [re.sub(r"[\d,]+ bytes|(?<=py:)\d+", "N", note) for note in notes] == [
        "mylib.my_rmsnorm has no rule: it runs whole on every rank (1x, N of results), first at train.py:N",
        "mylib.my_update has no rule: it runs whole on every rank (5x, N of results), in the optimizer's step",
    ]
