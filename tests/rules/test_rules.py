"""Every rule by brute force: whatever it allows to be split is split, and the ranks together still give what the operator gives.

`samples.SAMPLES` holds the calls. A rule without one fails here; so does a wrong one, of which a handful are planted at the end.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Node

from meshc.ir.mesh import Mesh
from meshc.rules import convolution, elementwise, every_family, operator_of, pooling, reduction, slices
from meshc.rules.rule import ALONE, Rule, einsum, pointwise
from meshc.testing.brute_force import BOTH, MESHES, Sample, build, check, prove, run_on_ranks
from tests.broad import broad
from tests.rules.samples import SAMPLES, f, i, pointwise_operators, pointwise_sample
from tests.rules.samples import calls as calls_of_samples
from tests.rules.samples import reduction as reduction_samples

aten = torch.ops.aten
ours = torch.ops.meshc

CALLS = [(str(op), number, call) for op, calls in SAMPLES.items() for number, call in enumerate(calls)]
TAGGED = [op for op in pointwise_operators() if op not in SAMPLES]
PAIRS = 1
"""Two axes are split so many ways, for so many samples of an operator, in each run of the tests; in all ways, for all, by
`make test-broad`."""
SAMPLES_A_RUN = 1
"""Of an operator; further ones are `make test-broad`'s."""
NO_TENSOR = {"aten.equal.default"}
"""Tagged as pointwise by torch, but its result is one truth: programs hold tensors only, so it never gets as far as a rule."""


def test_every_rule_has_a_sample() -> None:
    ruled = {op for family in every_family() for op, found in family.OPERATORS.items() if found.rule or found.pointwise}
    assert sorted(str(op) for op in ruled - set(SAMPLES)) == []


@pytest.mark.parametrize(
    "number, call",
    [(pytest.param if number < SAMPLES_A_RUN else broad)(number, call, id=f"{name}-{number}") for name, number, call in CALLS],
)
def test_rule(number: int, call: Sample) -> None:
    """Every letter on two ranks and on three, and a few pairs of letters on six."""
    assert build(call).instance.known, "there is no rule"
    assert prove(call, most_pairs=PAIRS if number < PAIRS else 0) > 0


@pytest.mark.parametrize("call", [broad(call, id=f"{name}-{number}") for name, number, call in CALLS])
def test_rule_in_all_pairs(call: Sample) -> None:
    assert prove(call) > 0


@pytest.mark.parametrize("op", [broad(op, id=str(op)) if number % 4 else op for number, op in enumerate(TAGGED)], ids=str)
def test_what_torch_calls_pointwise_is(op: Any) -> None:
    found = pointwise_sample(op)
    if found is None:
        assert str(op) in NO_TENSOR
        return
    assert prove(found) > 1


def test_a_sample_is_the_same_whatever_was_drawn_before() -> None:
    first = pointwise_sample(aten.atan2.default)
    f(3, 3)
    again = pointwise_sample(aten.atan2.default)
    assert first is not None and again is not None
    assert all(torch.equal(a, b) for a, b in zip(first.args, again.args, strict=True))


def test_every_sample_is_seeded_by_itself() -> None:
    """A family's file read alone, whatever was drawn before, and then without its first samples, gives the samples that it gives among
    the others."""
    f(3, 3)
    whole = _read_alone(reduction_samples.__file__, "")
    assert whole.keys() <= SAMPLES.keys() and sum(map(len, whole.values())) > 50
    for op, calls in whole.items():
        for one, other in zip(calls, SAMPLES[op], strict=True):
            _same(one, other)
    shorter = _read_alone(reduction_samples.__file__, "sample(aten.sum.")
    assert aten.sum.default not in shorter and aten.amax.default in shorter
    for op, calls in shorter.items():
        for one, other in zip(calls, SAMPLES[op], strict=True):
            _same(one, other)


def _read_alone(path: str, without: str) -> dict[Any, list[Sample]]:
    """A family's samples from its file, without the lines that begin so."""
    lines = Path(path).read_text().splitlines()
    text = "\n".join(line for line in lines if not without or not line.startswith(without))
    found: dict[Any, list[Sample]] = defaultdict(list)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls_of_samples, "SAMPLES", found)
        exec(compile(text, path, "exec"), {"__name__": reduction_samples.__name__})
    return found


def _same(one: Sample, other: Sample) -> None:
    for a, b in zip(one.args, other.args, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) if isinstance(a, torch.Tensor) else a == b


def splittable(op: Any, *args: Any, **kwargs: Any) -> str:
    """The letters that may be split, `+` before those that leave a sum."""
    one = build(Sample(op, args, kwargs))
    summed = {token for sums in one.instance.sums for token in sums}
    return " ".join(sorted(f"{'+' * (token in summed)}{token[0]}" for token in one.tokens()))


def test_what_may_be_split() -> None:
    """Legality alone would be served by rules that allow nothing."""
    assert splittable(aten.mm.default, f(5, 4), f(4, 7)) == "+k m n"
    assert splittable(aten.addmm.default, f(7), f(5, 4), f(4, 7)) == "+k m n"
    assert splittable(aten.embedding.default, f(7, 4), i(7, 3, 5)) == "+v d i0 i1"
    assert splittable(aten._softmax.default, f(5, 4), -1, False) == "d0"
    assert splittable(aten._log_softmax.default, f(5, 4), -1, False) == "d0 d1"
    assert splittable(aten.view.default, f(6, 5), [2, 3, 5]) == "i0 i0 i1"
    assert splittable(aten.split.Tensor, f(4, 6), 2, -1) == "d0 d1"
    assert splittable(aten.slice.Tensor, f(4, 6), 1, 1) == "d0"
    assert splittable(aten.var.correction, f(5, 4), [1]) == "d0 d1"
    assert splittable(aten.logsumexp.default, f(5, 7), [1]) == "d0 d1"
    assert splittable(aten.linalg_vector_norm.default, f(5, 7), 2, [1]) == "d0 d1"
    assert splittable(aten.prod.dim_int, f(5, 7), 1) == "d0 d1"
    assert splittable(aten.any.dim, f(5, 7), 1) == "+d1 d0"
    assert splittable(aten.argmax.default, f(5, 7), 1) == "d0 d1"
    assert splittable(aten.cumsum.default, f(5, 7), 1) == "d0 d1"
    assert splittable(aten.constant_pad_nd.default, f(5, 7), [1, -1], 0.0) == "d0 o1"
    assert splittable(aten.cummax.default, f(5, 7), 1) == "d0 d1"
    assert splittable(aten.topk.default, f(5, 4), 2) == "d0"
    assert splittable(ours.keep_largest.default, f(5, 3, 4), 2, 2) == "d0 d1"
    assert splittable(aten.gather.default, f(5, 7), 1, i(7, 5, 3)) == "+v a0 j"
    assert splittable(aten.scatter_add.default, f(5, 7), 1, i(7, 5, 3), f(5, 3)) == "+j a0 v"
    assert splittable(aten.scatter.src, f(5, 7), 1, i(7, 5, 3), f(5, 3)) == "a0 v"
    assert splittable(aten.index_add.default, f(5, 7), 1, i(7, 3), f(5, 3)) == "+j a0 v"
    assert splittable(aten._fft_r2c.default, f(5, 7), [1], 0, True) == "d0"
    assert splittable(aten.linalg_solve_triangular.default, f(5, 3, 3), f(5, 3, 4), upper=False) == "*0 k"
    assert splittable(aten.im2col.default, f(3, 5, 6, 6), [2, 2], [1, 1], [0, 0], [1, 1]) == "b c"
    assert splittable(aten.index_put.default, f(5, 7), [i(5, 3)], f(3, 7), True) == "+i0 a1"
    assert splittable(aten.index_put.default, f(5, 7), [i(5, 3)], f(3, 7)) == "a1"
    assert splittable(aten.tril.default, f(5, 4)) == "d0 d1"
    assert splittable(aten.stack.default, [f(5, 4), f(5, 4)], 1) == "d0 d1"
    assert splittable(ours.grouped_mm.default, f(7, 5), f(3, 5, 4), torch.tensor([2, 2, 7])) == "+k n"
    assert splittable(ours.grouped_outer.default, f(7, 5), f(7, 4), torch.tensor([2, 2, 7])) == "k n"
    assert splittable(ours.routed_mm.default, f(7, 5), f(3, 5, 4), i(3, 7)) == "+k n r"
    assert splittable(ours.routed_outer.default, f(7, 5), f(7, 4), i(3, 7), 3) == "+r k n"
    assert splittable(aten.histc.default, f(5, 7), 4, -1, 1) == "+d0 +d1"
    assert splittable(aten.histc.default, f(5, 7), 4) == ""
    q, k = f(2, 3, 5, 4), f(2, 3, 7, 4)
    assert splittable(ours.attention.default, q, k, k, None, False, 0.5) == "b h q"
    assert splittable(ours.attention.default, q, q, q, None, True, 0.5) == "b h q"
    assert splittable(ours.attention.default, q, q, q, None, True, 0.5, 3) == "b h q"
    assert splittable(ours.attention.default, q, k, k, None, True, 0.5, 0, 2) == "b h q"
    assert splittable(ours.attention.default, q, k, k, None, True, 0.5, 0, 0, 5, 0, 7) == "b h"
    assert splittable(ours.attention_merge.default, q, f(2, 3, 5), q, f(2, 3, 5)) == "b d h q"
    keys, values = f(2, 3, 7, 4), f(2, 3, 7, 5)
    delta = keys, keys, values, keys, -f(2, 3, 7).abs(), None
    assert splittable(ours.delta_rule.default, *delta) == "*0 h t v"
    assert splittable(ours.delta_rule_backward.default, values, *delta, None) == "*0 +v h t"
    assert splittable(aten.convolution.default, f(3, 4, 6), f(5, 4, 3), None, [1], [1], [1], False, [0], 1) == "+i b o y0"


def test_only_the_major_factor_of_an_indexed_dim_may_be_split() -> None:
    """The rows of a rank must be a range, or an index could not be told to lie inside."""
    one = build(Sample(aten.embedding.default, (f(10, 4), i(10, 3)), refine={0: (5, 2, 4)}))
    assert [token for token in one.instance.size if token[0] == "v"] == [("v", 0), ("v", 1)]
    assert [token for token in one.tokens() if token[0] == "v"] == [("v", 0)]


def test_every_other_position_is_a_split_of_a_dim() -> None:
    """Of 5 * 3 positions every third: 5, of which ranks may have parts, and one of three, which is on all of them."""
    forward = Sample(aten.slice.Tensor, (f(15, 4), 0, 1, 15, 3), refine={0: (5, 3, 4)})
    backward = Sample(aten.slice_backward.default, (f(5, 4), [15, 4], 0, 1, 15, 3), refine={~0: (5, 3, 4)})
    for sample in (forward, backward):
        one = build(sample)
        assert sorted(one.instance.size[token] for token in one.tokens()) == [4, 5]


CROPS = [
    Sample(aten.slice.Tensor, (f(2, 3, 8), 2, 0, 5), {}),
    Sample(aten.slice.Tensor, (f(2, 7, 4), 1, 2, -1), {}),
    Sample(aten.slice.Tensor, (f(2, 3, 9), 2, 1, 9, 2), {}),
    Sample(aten.slice.Tensor, (f(2, 3, 6), 2, 0, 3), {}),
    Sample(aten.slice_backward.default, (f(2, 3, 5), [2, 3, 8], 2, 0, 5, 1), {}),
    Sample(aten.slice_backward.default, (f(2, 4, 4), [2, 7, 4], 1, 2, 6, 1), {}),
    Sample(aten.constant_pad_nd.default, (f(2, 3, 5), [3, 0]), {}),
    Sample(aten.constant_pad_nd.default, (f(2, 3, 5, 4), [1, 2, -1, 0], 0.5), {}),
    Sample(aten.constant_pad_nd.default, (f(2, 3, 7, 4), [0, -1, -2, -2]), {}),
]


@pytest.mark.parametrize("call", CROPS, ids=[f"{call.name}-{number}" for number, call in enumerate(CROPS)])
def test_crops_beside_windows(monkeypatch: pytest.MonkeyPatch, call: Sample) -> None:
    """Alone they keep their dim whole; here they are told that a convolution is next to them."""
    alone = {token[0] for token in build(call).tokens()}
    monkeypatch.setattr(slices, "beside_windows", lambda node, dims: True)
    assert len({token[0] for token in build(call).tokens()} - alone) > 0
    assert prove(call) > 10


def convolution_of_any_kind(draw: random.Random) -> tuple[Sample, Sample]:
    """A convolution along one dim, forward and backward, transposed one time in three, its settings drawn."""
    transposed = draw.random() < 0.34
    kernel, stride, dilation = draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 3)
    padding = draw.randint(0, dilation * (kernel - 1)) if transposed else draw.randint(0, 4)
    output_padding = draw.randrange(max(stride, dilation)) if transposed else 0
    needs = 1 + padding if transposed else dilation * (kernel - 1) + 1
    x = f(2, 2, draw.randint(max(2, needs), needs + 9))
    settings = ([stride], [padding], [dilation], transposed, [output_padding], 1)
    weight = f(2, 2, kernel)
    y = aten.convolution(x, weight, None, *settings)
    forward = Sample(aten.convolution.default, (x, weight, f(2), *settings))
    return forward, Sample(aten.convolution_backward.default, (f(*y.shape), x, weight, [2], *settings, [True, True, True]))


@pytest.mark.broad
def test_convolutions_of_any_kind_split_along_space() -> None:
    draw = random.Random(0)
    kinds = [sample for _ in range(60) for sample in convolution_of_any_kind(draw)]
    split = 0
    for sample in kinds:
        one = build(sample)
        for token in [token for token in one.tokens() if token[0] in ("x0", "y0")]:
            for mesh, axes in ((MESHES[0], ("a",)), (MESHES[1], ("a",)), (Mesh("a=5"), ("a",)), (BOTH, ("a", "b")), (BOTH, ("b", "a"))):
                chosen = {token: axes}
                check(sample, one, run_on_ranks(one, mesh, chosen), f"{sample.args} on {mesh}")
                split += 1
    assert split > 500


# ------------------------------------------------------------------------------------------------------------- planted wrong rules


def softmax_with_its_dim(node: Node, tensors: list[Node]) -> Rule:
    return pointwise(node, tensors)


def mm_without_its_sum(node: Node, tensors: list[Node]) -> Rule:
    return einsum("m k, k n -> m n", node, tensors)


def mean_of_local_means(node: Node, tensors: list[Node]) -> Rule:
    found = reduction._mean(node, tensors)
    return Rule(found.operands, found.results, found.sums, kind="compute")


def layer_norm_over_a_split_dim(node: Node, tensors: list[Node]) -> Rule:
    def lower(local: Any) -> Node:
        found: Node = local.emit(node.target, local.operands[0], [local.local_size("c0")], *local.operands[1:], node.args[4])
        return found

    return einsum("b0 b1 c0, c0, c0 -> b0 b1 c0 | b0 b1 _ | b0 b1 _", node, tensors, lower=lower)


def addmm_with_a_bias_on_each_rank(node: Node, tensors: list[Node]) -> Rule:
    return einsum("n, m k, k n -> m n +k", node, tensors)


def causal_attention_over_split_queries(node: Node, tensors: list[Node]) -> Rule:
    return einsum("b h q d!, b h k! d!, b h k! d! -> b h q d! | b h q", node, tensors)


def sum_that_leaves_padding(node: Node, tensors: list[Node]) -> Rule:
    found = reduction.reduce(node, tensors, "sum")
    return Rule(found.operands, found.results, found.sums, kind="carry", self_masked=True)


def maximum_with_zero_padding(node: Node, tensors: list[Node]) -> Rule:
    found = reduction.reduce(node, tensors, "max")
    return Rule(found.operands, found.results, found.sums, neutral=0.0)


def exponential_of_a_partial_sum(node: Node, tensors: list[Node]) -> Rule:
    return pointwise(node, tensors, linear=ALONE)


def arange_that_starts_at_zero(node: Node, tensors: list[Node]) -> Rule:
    def lower(local: Any) -> Node:
        found: Node = local.emit(aten.arange.default, local.local_size("d0"), device=torch.device("cpu"))
        return found

    return Rule((), (("d0",),), ({},), lower=lower)


def cat_of_tiles(node: Node, tensors: list[Node]) -> Rule:
    return einsum("d0 a, d0 a -> d0 b", node, tensors)


def embedding_that_reads_row_zero(node: Node, tensors: list[Node]) -> Rule:
    """Indices are shifted, but those of other ranks are not masked."""

    def lower(local: Any) -> Node:
        weight, index = local.operands
        shifted = local.emit(aten.sub.Tensor, index, local.start("v"))
        found: Node = local.emit(aten.embedding.default, weight, local.emit(aten.clamp.default, shifted, 0, local.local_size("v") - 1))
        return found

    return einsum("v d, i0 i1 -> i0 i1 d +v", node, tensors, lower=lower, clean=(1,))


def convolution_that_looks_one_element_too_far_left(node: Node, tensors: list[Node]) -> Rule:
    found = convolution._convolution(node, tensors)
    return replace(found, windows={y: (x, replace(window, offset=window.offset - 1)) for y, (x, window) in found.windows.items()})


def convolution_of_the_tile_with_its_padding(node: Node, tensors: list[Node]) -> Rule:
    return replace(convolution._convolution(node, tensors), lower=None)


def convolution_backward_that_keeps_its_neighbours_part(node: Node, tensors: list[Node]) -> Rule:
    """The gradient of the window is cut down to the tile instead of summed into it."""

    def lower(local: Any) -> Any:
        local.sum_of_windows = lambda x, dim, letter: (
            local.emit(aten.slice.Tensor, x, dim, 1, 1 + local.local_size(f"x{letter[1:]}")) if local.axes(letter) else x
        )
        return convolution._lower_convolution_backward(local)

    return replace(convolution._convolution_backward(node, tensors), lower=lower)


def convolution_backward_with_padding_in_its_gradient(node: Node, tensors: list[Node]) -> Rule:
    return replace(convolution._convolution_backward(node, tensors), clean=(), self_masked=True)


def maximum_that_sees_zeros_beyond_the_ends(node: Node, tensors: list[Node]) -> Rule:
    def lower(local: Any) -> Any:
        window = local.window
        local.window = lambda x, dim, letter, fill: window(x, dim, letter, 0.0)
        return pooling._lower_max_pool(local)

    return replace(pooling._max_pool(node, tensors), lower=lower)


def maximum_that_remembers_local_positions(node: Node, tensors: list[Node]) -> Rule:
    def lower(local: Any) -> Any:
        made = pooling._lower_max_pool(local)
        return made if not isinstance(made, list) else [made[0], local.build.item(made[0].args[0], 1)]

    return replace(pooling._max_pool(node, tensors), lower=lower)


def largest_of_a_tile_of_a_group(node: Node, tensors: list[Node]) -> Rule:
    """Each rank keeps the largest of what it has of a group."""
    return pointwise(node, tensors, kind="layout")


PLANTED: list[tuple[Callable[[Node, list[Node]], Rule], Any, int]] = [
    (softmax_with_its_dim, aten._softmax.default, 0),
    (mm_without_its_sum, aten.mm.default, 0),
    (mean_of_local_means, aten.mean.dim, 0),
    (layer_norm_over_a_split_dim, aten.native_layer_norm.default, 0),
    (addmm_with_a_bias_on_each_rank, aten.addmm.default, 0),
    (causal_attention_over_split_queries, ours.attention.default, 1),
    (sum_that_leaves_padding, aten.sum.dim_IntList, 0),
    (maximum_with_zero_padding, aten.amax.default, 0),
    (exponential_of_a_partial_sum, aten.exp.default, 0),
    (arange_that_starts_at_zero, aten.arange.default, 0),
    (cat_of_tiles, aten.cat.default, 0),
    (embedding_that_reads_row_zero, aten.embedding.default, 0),
    (convolution_that_looks_one_element_too_far_left, aten.convolution.default, 0),
    (convolution_of_the_tile_with_its_padding, aten.convolution.default, 0),
    (convolution_backward_that_keeps_its_neighbours_part, aten.convolution_backward.default, 0),
    (convolution_backward_with_padding_in_its_gradient, aten.convolution_backward.default, 0),
    (maximum_that_sees_zeros_beyond_the_ends, aten.max_pool2d_with_indices.default, 1),
    (maximum_that_remembers_local_positions, aten.max_pool2d_with_indices.default, 1),
    (largest_of_a_tile_of_a_group, ours.keep_largest.default, 0),
]


SLOW = (
    convolution_of_the_tile_with_its_padding, convolution_backward_that_keeps_its_neighbours_part,
    convolution_backward_with_padding_in_its_gradient, maximum_that_sees_zeros_beyond_the_ends,
)  # fmt: skip


def plant(monkeypatch: pytest.MonkeyPatch, op: Any, **facts: Any) -> None:
    """Changes an operator's record."""
    family = next((family for family in every_family() if op in family.OPERATORS), elementwise)
    monkeypatch.setitem(family.OPERATORS, op, replace(operator_of(op), **facts))


@pytest.mark.parametrize(
    ("wrong", "op", "number"), [(broad if one[0] in SLOW else pytest.param)(*one, id=one[0].__name__) for one in PLANTED]
)
def test_a_planted_wrong_rule_is_caught(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Rule], op: Any, number: int) -> None:
    call = SAMPLES[op][number] if SAMPLES.get(op) else pointwise_sample(op)
    assert call is not None
    prove(call)
    plant(monkeypatch, op, rule=wrong)
    with pytest.raises((AssertionError, RuntimeError)):
        prove(call)


@pytest.mark.parametrize("op", [aten.exp.default, aten.sigmoid.default], ids=str)
def test_a_planted_wrong_deferral_is_caught(monkeypatch: pytest.MonkeyPatch, op: Any) -> None:
    """Averages do not pass through what is not affine."""
    call = pointwise_sample(op)
    assert call is not None
    plant(monkeypatch, op, affine=((0,),))
    with pytest.raises(AssertionError, match="avg"):
        prove(call)
