"""Operators that take each element alone, operands that broadcast, casts, comparisons, and what works in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fuzz.menu.entry import Entry

if TYPE_CHECKING:
    from tests.fuzz.draw import Drawer

ONE_OPERAND = (
    "torch.relu({0})", "torch.tanh({0})", "torch.sigmoid({0})", "torch.sin({0})", "torch.cos({0})", "torch.exp({0}.clamp(max=4.0))",
    "torch.log1p({0}.abs())", "torch.sqrt({0}.abs() + 0.5)", "torch.rsqrt({0}.abs() + 0.5)", "torch.reciprocal({0}.abs() + 1.0)",
    "{0}.abs()", "-{0}", "{0} * 0.5", "{0} / 3.0", "{0} + 1.5", "2.0 - {0}", "1.0 / ({0} * {0} + 1.0)", "{0}.square()", "{0} ** 3",
    "{0}.clamp(-0.5, 1.0)", "{0}.floor()", "{0}.sign()", "torch.erf({0})", "torch.atan({0})", "torch.expm1({0}.clamp(max=2.0))",
    "F.gelu({0})", "F.gelu({0}, approximate='tanh')", "F.silu({0})", "F.elu({0})", "F.leaky_relu({0}, 0.2)", "F.softplus({0})",
    "F.hardtanh({0})", "F.hardswish({0})", "F.hardsigmoid({0})", "F.mish({0})", "F.logsigmoid({0})", "F.relu6({0})", "F.selu({0})",
    "torch.zeros_like({0})", "torch.ones_like({0}) * {0}", "torch.full_like({0}, 0.25)", "{0}.nan_to_num()", "{0}.detach()",
    "{0}.contiguous()", "{0}.clone()", "torch.nan_to_num(torch.log({0}), 0.0, 0.0, 0.0)", "{0}.masked_fill({0} > 0.5, -1.0)",
    "torch.where({0} > 0, {0}, 0.1)", "F.threshold({0}, 0.1, 0.3)", "F.tanhshrink({0})", "F.softshrink({0}, 0.3)", "{0}.trunc()",
    "{0}.frac()", "{0}.positive()", "torch.sinc({0})", "{0}.float().double()", "{0}.clamp(min=0.1).pow(0.5)",
    "torch.special.xlogy({0}, 2.0)",
)  # fmt: skip
TWO_OPERANDS = (
    "{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / ({1}.abs() + 0.7)", "torch.maximum({0}, {1})", "torch.minimum({0}, {1})",
    "torch.where({0} > {1}, {0}, {1} * 2.0)", "torch.atan2({0}, {1}.abs() + 0.5)", "torch.hypot({0}, {1}.abs() + 0.1)",
    "torch.add({0}, {1}, alpha=0.5)", "torch.lerp({0}, {1}, 0.3)", "F.mse_loss({0}, {1}.expand_as({0}), reduction='none')",
    "F.smooth_l1_loss({0}, {1}.expand_as({0}), reduction='none')", "torch.logaddexp({0}, {1})", "torch.copysign({0}, {1})",
    "{0}.clamp(min={1})", "torch.remainder({0}, {1}.abs() + 1.0)", "torch.rsub({0}, {1})", "torch.xlogy({0}, {1}.abs() + 0.5)",
    "torch.pow({0}.abs() + 0.5, {1}.clamp(-2.0, 2.0))", "torch.floor_divide({0}, {1}.abs() + 1.0)",
    "torch.heaviside({0}.detach(), {1}.detach())",
)  # fmt: skip
COMPARISONS = (
    "{0} > {1}", "{0} <= {1}", "{0} == {1}", "({0} > 0) & ({1} < 0)", "torch.logical_or({0} > 1, {1} > 1)", "torch.logical_not({0})",
    "torch.isfinite({0})", "{0}.ne({1})", "({0} > {1}) ^ ({0} > 0)",
)  # fmt: skip
IN_PLACE = (
    "{out} = {0}.clone()\n{out}.add_({1})",
    "{out} = {0} * 1.0\n{out} *= {1}",
    "{out} = {0}.clone()\n{out}.sub_({1}, alpha=0.5).tanh_()",
    "{out} = {0} + 0.0\n{out}.copy_({1})",
    "{out} = {0} * 2.0\n{out}.clamp_(-1.0, 1.0)",
    "{out} = torch.empty_like({0})\n{out}.fill_(0.5)\n{out} = {out} * {1}",
    "{out} = torch.zeros_like({0})\n{out} += {1}",
    "{out} = {0}.clone()\n{out}.reshape(-1).mul_(0.5)\n{out} = {out} + {1}",
    "{out} = {0}.clone()\n{out}.masked_fill_({1} > 0, 0.0)",
    "{out} = {0} + 1.0\n{out}.zero_()\n{out} = {out} + {1}",
)


def _one(d: Drawer) -> tuple[str, list[str]]:
    return d.one(ONE_OPERAND), [d.floating()]


def _two(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating()
    return d.one(TWO_OPERANDS), [x, d.broadcasting(d.shape(x))]


def _both_broadcast(d: Drawer) -> tuple[str, list[str]]:
    """[a, 1] and [b]: neither has the shape of the result."""
    x = d.floating(1, 4)
    column = d.leaf([*d.shape(x)[:-1], 1]) if d.coin(0.3) else d.floating(1, 4)
    return d.one(TWO_OPERANDS[:6]), [x, column]


def _three(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating()
    shape = d.shape(x)
    text = d.one(("torch.addcmul({0}, {1}, {2})", "torch.addcdiv({0}, {1}, {2}.abs() + 1.0)", "torch.lerp({0}, {1}, {2}.sigmoid())",
                  "torch.clamp({0}, -{1}.abs(), {2}.abs())", "{0} * {1} + {2}"))  # fmt: skip
    return text, [x, d.broadcasting(shape), d.broadcasting(shape)]


def _comparison(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating()
    return d.one(COMPARISONS), [x, d.broadcasting(d.shape(x))]


def _chosen(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating()
    return d.one(("torch.where({0}, {1}, {2})", "{1}.masked_fill({0}, 0.5) + {2}", "{1} * {0} + {2}",
                  "{1}.masked_fill(~{0}, -2.0) + {2}")), [
        d.truths(d.shape(x)), x, d.broadcasting(d.shape(x)),
    ]  # fmt: skip


def _in_place(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating()
    return d.one(IN_PLACE), [x, d.broadcasting(d.shape(x))]


def _narrow(d: Drawer) -> tuple[str, list[str]]:
    """16-bit floats and short integers, by operators that round each element alone: what is left is the same on every mesh."""
    x = d.floating()
    text = d.one(("({0}.bfloat16() * 0.75).double()", "{0}.half().relu().double() + {1}", "({0}.bfloat16() + {1}.bfloat16()).double()",
                  "({0}.half() > 0.5).double() * {1}", "({0} * 3).to(torch.int32).to(torch.float64) + {1}",
                  "({0} * 3).clamp(-9, 9).to(torch.int16).remainder(4).double()", "({0}.abs() * 3).clamp(0, 40).to(torch.uint8).long()",
                  "{1} + ({0}.clamp(-4, 4) * 8).to(torch.int8).abs()",
                  "({0} > 0).to(torch.uint8).sum(-1, keepdim=True) + {0}"))  # fmt: skip
    return text, [x, d.like(d.shape(x))]


def _cast(d: Drawer) -> tuple[str, list[str]]:
    texts = ("({0} * 3).to(torch.int64)", "{0} > 0", "{0}.bool()", "({0} > 0).double()", "({0} > 0).long()", "({0} * 2).int().double()")
    return d.one(texts), [d.floating()]


def _integers(d: Drawer) -> tuple[str, list[str]]:
    x = d.existing(lambda v: v.dtype.is_floating_point is False and str(v.dtype) == "torch.int64") or d.leaf(d.any_shape(1, 3), "int64", 7)
    texts = ("{0} + 1", "{0} % 3", "{0} // 2", "{0}.double() * 0.25", "({0} > 2).double()", "{0} * {0}", "{0}.clamp(1, 4)", "{0} - 2",
             "{0} & 3",
             "{0} == 1", "-{0}", "{0}.abs()", "torch.bitwise_xor({0}, 5)")  # fmt: skip
    return d.one(texts), [x]


def _glu(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 4)
    dim = d.one([i for i, extent in enumerate(d.shape(x)) if extent % 2 == 0])
    return f"F.glu({{0}}, {dim})", [x]


def _prelu(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(2, 4)
    return "F.prelu({0}, {1})", [x, d.like([d.one([1, d.shape(x)[1]])])]


MENU: dict[str, Entry] = {
    "one": _one,
    "one more": _one,
    "two": _two,
    "two more": _two,
    "both broadcast": _both_broadcast,
    "three": _three,
    "comparison": _comparison,
    "chosen": _chosen,
    "in place": _in_place,
    "cast": _cast,
    "narrow": _narrow,
    "integers": _integers,
    "glu": _glu,
    "prelu": _prelu,
}
