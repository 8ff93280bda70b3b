"""Random operators: the generator against published vectors, every tiling against the whole, kernels against each other, and statistics."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from meshc.errors import MeshcError
from meshc.frontend.reference import ReferenceRandom
from meshc.ops import philox, random
from meshc.ops.random_calls import RAISED, draws, is_random

ops = torch.ops.meshc
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, block.
VECTORS = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def numpy_uniform(seed: int, step: int, call: int, n: int) -> numpy.ndarray:
    """The ten lines of docs/randomness.md, as they stand there."""
    text = (Path(__file__).parents[2] / "docs" / "randomness.md").read_text()
    names: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    return names["uniform32"](seed, step, call, n)


def seeded(seed: int = 1234567890123456789, step: int = 3) -> Tensor:
    return random.seed_step(seed, step)


# ------------------------------------------------------------------------------------------------------------------- the generator


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...], compiled: bool) -> None:
    assert tuple(philox.block(counter, key, compiled)) == expected


def test_first_draw_is_the_first_known_answer() -> None:
    drawn = random.uniform(random.seed_step(0, 0), 0, (4,))
    assert [int(value) for value in drawn.double() * 2**24] == [word >> 8 for word in VECTORS[0][2]]
    wide = random.uniform(random.seed_step(0, 0), 0, (2,), torch.float64)
    assert int(wide[0] * 2**53) == (0x6627E8D5 << 32 | 0xE169C58D) >> 11
    assert int(wide[1] * 2**53) == (0xBC57AC4C << 32 | 0x9B00DBD8) >> 11


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5, 2**64 - 1])
def test_ten_lines_of_numpy(seed: int) -> None:
    assert (numpy_uniform(seed, 11, 5, 1001) == random.uniform(random.seed_step(seed, 11), 5, (7, 11, 13)).numpy().ravel()).all()


def test_normal_is_box_muller() -> None:
    words = numpy_uniform(99, 1, 2, 4000).astype(numpy.float64).reshape(-1, 2)
    radius, angle = numpy.sqrt(-2 * numpy.log(words[:, 0] + 2.0**-24)), 2 * math.pi * words[:, 1]
    expected = numpy.stack([radius * numpy.cos(angle), radius * numpy.sin(angle)], 1).ravel()
    assert numpy.abs(random.normal(random.seed_step(99, 1), 2, (4000,)).numpy() - expected).max() < 1e-6


def test_normal_float64_is_box_muller() -> None:
    first = [(VECTORS[0][2][0] << 32 | VECTORS[0][2][1]) >> 11, (VECTORS[0][2][2] << 32 | VECTORS[0][2][3]) >> 11]
    radius, angle = math.sqrt(-2 * math.log((first[0] + 1) / 2**53)), 2 * math.pi * first[1] / 2**53
    drawn = random.normal(random.seed_step(0, 0), 0, (2,), torch.float64)
    assert drawn.tolist() == pytest.approx([radius * math.cos(angle), radius * math.sin(angle)], rel=1e-14)


# ------------------------------------------------------------------------------------------------------------------------- tilings


@st.composite
def tiles(draw: Callable[..., Any]) -> tuple[list[int], list[int], list[int]]:
    """A global shape and a tile of it that may reach past the end; long rows as well as short ones."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)) + [draw(st.integers(1, 90))]
    offsets = [draw(st.integers(0, size - 1)) for size in shape]
    return shape, [draw(st.integers(1, size)) for size in shape], offsets


def take(whole: Tensor, local: list[int], offsets: list[int]) -> Tensor:
    for dim, (size, offset) in enumerate(zip(local, offsets, strict=True)):
        whole = whole.narrow(dim, offset, min(size, whole.shape[dim] - offset))
    return whole


DRAWS: dict[str, Callable[..., Tensor]] = {
    "uniform": lambda *tile: ops.uniform(seeded(), 4, *tile, torch.float32),
    "uniform64": lambda *tile: ops.uniform(seeded(), 4, *tile, torch.float64),
    "uniform_bf16": lambda *tile: ops.uniform(seeded(), 4, *tile, torch.bfloat16),
    "normal": lambda *tile: ops.normal(seeded(), 4, *tile, torch.float32),
    "normal64": lambda *tile: ops.normal(seeded(), 4, *tile, torch.float64),
    "keep_mask": lambda *tile: ops.keep_mask(seeded(), 4, 0.3, *tile),
    "dropout": lambda *tile: ops.dropout(torch.ones(tile[1]), seeded(), 4, 0.3, *tile)[0],
    "dropout64": lambda *tile: ops.dropout(torch.ones(tile[1], dtype=torch.float64), seeded(), 4, 0.3, *tile)[0],
    "dropout_mask": lambda *tile: ops.dropout(torch.ones(tile[1]), seeded(), 4, 0.3, *tile)[1],
}


@pytest.mark.parametrize("name", DRAWS)
@settings(max_examples=40)
@given(tiles())
def test_a_tile_is_a_part_of_the_whole(name: str, tile: tuple[list[int], list[int], list[int]]) -> None:
    shape, local, offsets = tile
    draw = DRAWS[name]
    whole, part = draw(shape, shape, [0] * len(shape)), draw(shape, local, offsets)
    assert list(part.shape) == local
    assert part.isfinite().all()
    expected = take(whole, local, offsets)
    assert torch.equal(part[tuple(slice(size) for size in expected.shape)], expected)


@pytest.mark.parametrize("name", ["uniform", "uniform64", "normal", "normal64", "keep_mask", "dropout"])
@settings(max_examples=10)
@given(tiles())
def test_without_a_compiler_the_bits_are_the_same(name: str, tile: tuple[list[int], list[int], list[int]]) -> None:
    shape, local, offsets = tile
    compiled = DRAWS[name](shape, local, offsets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(philox, "library", lambda: None)
        assert torch.equal(DRAWS[name](shape, local, offsets), compiled)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("row", [7, 1 << 12])
def test_threads_do_not_matter(threads: int, row: int) -> None:
    rows = (1 << 19) // row
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        drawn = ops.uniform(seeded(), 0, [rows, row + 3], [rows, row], [0, 2], torch.float32)
    finally:
        torch.set_num_threads(before)
    whole = torch.from_numpy(numpy_uniform(1234567890123456789, 3, 0, rows * (row + 3))).view(rows, row + 3)
    assert torch.equal(drawn, whole[:, 2 : row + 2])


def test_indices_are_64_bits_wide() -> None:
    shape, offset = [1 << 20, 1 << 20], [(1 << 20) - 1, (1 << 20) - 40]
    near_end = ops.uniform(seeded(), 0, shape, [1, 40], offset, torch.float32).flatten()
    one_by_one = torch.cat([ops.uniform(seeded(), 0, [1 << 40], [1], [(1 << 40) - 40 + i], torch.float32) for i in range(40)])
    assert torch.equal(near_end, one_by_one)
    same_low_bits = ops.uniform(seeded(), 0, [1 << 40], [40], [(1 << 34) - 40], torch.float32)
    assert not torch.equal(near_end, same_low_bits)


def test_dropout_takes_x_in_another_shape() -> None:
    """A dim of 12 = 3 heads of 4, split over the heads: the tile has one dim more than x."""
    x = torch.randn(5, 12)
    whole = random.dropout(x, seeded(), 2, 0.4)
    part, mask = ops.dropout(x[:, 4:8], seeded(), 2, 0.4, [5, 3, 4], [5, 1, 4], [0, 1, 0])
    assert part.shape == mask.shape == (5, 4)
    assert torch.equal(part, whole[:, 4:8])


def test_empty_and_scalar() -> None:
    assert random.uniform(seeded(), 0, (0, 3)).shape == (0, 3)
    assert random.dropout(torch.ones(0, 3), seeded(), 0, 0.5).shape == (0, 3)
    assert random.uniform(seeded(), 0, ()).shape == ()


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        ops.uniform(seeded(), 0, [4], [2, 2], [0], torch.float32)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        random.keep_mask(seeded(), 0, 1.5, (3,))
    with pytest.raises(ValueError, match="local shape"):
        ops.dropout(torch.ones(3), seeded(), 0, 0.5, [4], [4], [0])
    with pytest.raises(TypeError, match="int32"):
        random.uniform(seeded(), 0, (3,), torch.int32)


# ---------------------------------------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_statistics(dtype: torch.dtype) -> None:
    n = 1 << 18
    drawn = random.uniform(seeded(), 0, (n,), dtype).double()
    assert drawn.min() >= 0 and drawn.max() < 1
    step = torch.finfo(dtype).eps / 2  # values lie on multiples of this, rounded down
    assert abs(drawn.mean() - (0.5 - step / 2)) < 4 / math.sqrt(12 * n)
    assert abs(drawn.var() - 1 / 12) < 0.001
    bins = torch.histc(drawn, 64, 0, 1)
    chi_square = ((bins - n / 64) ** 2 / (n / 64)).sum()
    assert 25 < chi_square < 120  # 63 degrees of freedom: 63 +- 11


@pytest.mark.parametrize("dtype", FLOATS)
def test_normal_statistics(dtype: torch.dtype) -> None:
    n = 1 << 18
    drawn = random.normal(seeded(), 0, (n,), dtype).double()
    assert abs(drawn.mean()) < 4 / math.sqrt(n)
    assert abs(drawn.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((drawn**4).mean() - 3) < 0.1
    for bound in (-2.0, -1.0, 0.5, 2.5):
        below = 0.5 * (1 + math.erf(bound / math.sqrt(2)))
        assert abs((drawn < bound).double().mean() - below) < 0.005


def test_calls_steps_seeds_and_neighbours_are_independent() -> None:
    n = 1 << 17
    base = random.uniform(random.seed_step(1, 1), 1, (n,)) - 0.5
    others = [
        random.uniform(random.seed_step(1, 1), 2, (n,)),
        random.uniform(random.seed_step(1, 2), 1, (n,)),
        random.uniform(random.seed_step(2, 1), 1, (n,)),
        random.uniform(random.seed_step(1 + (1 << 32), 1), 1, (n,)),
        base.roll(1) + 0.5,
        base.roll(4) + 0.5,
    ]
    for other in others:
        assert abs(12 * (base * (other - 0.5)).mean()) < 5 / math.sqrt(n)


def test_step_and_call_count_modulo_two_to_the_32() -> None:
    assert torch.equal(random.uniform(random.seed_step(1, 5), 7, (9,)), random.uniform(random.seed_step(1, 5 + 2**32), 7 + 2**32, (9,)))


# ------------------------------------------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_dropout_keeps_one_minus_p(dtype: torch.dtype, p: float) -> None:
    x = torch.randn(1 << 17).to(dtype)
    out, mask = ops.dropout(x, seeded(), 1, p, x.shape, x.shape, [0])
    assert out.dtype == dtype and mask.dtype == torch.bool
    assert abs(mask.double().mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / x.numel()) + 1e-12
    assert torch.equal(mask, random.keep_mask(seeded(), 1, p, x.shape))
    assert torch.equal(mask, random.uniform(seeded(), 1, x.shape) >= random.keep_threshold(1 - p) * 2.0**-24)
    expected = torch.where(mask, x.double() / (1 - p), 0.0) if p < 1 else torch.zeros(x.shape, dtype=torch.float64)
    torch.testing.assert_close(out, expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_dropped_values_are_zero_whatever_they_were() -> None:
    x = torch.full((1000,), math.nan)
    assert (random.dropout(x, seeded(), 0, 0.5)[~random.keep_mask(seeded(), 0, 0.5, (1000,))] == 0).all()
    assert (random.dropout(x, seeded(), 0, 1.0) == 0).all()


@pytest.mark.parametrize("p", [0.0, 0.1, 0.3, 0.5, 0.7, 0.999, 1.0, 2**-25, 3 * 2**-25, 1 / 3])
def test_keeping_and_dropping_round_alike(p: float) -> None:
    """torch's dropout hands 1 - p to bernoulli_, which the reference turns into keep_mask(1 - (1 - p))."""
    assert random.keep_threshold(1.0 - p) == random.keep_threshold(1.0 - (1.0 - (1.0 - p)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dropout_derivative(dtype: torch.dtype) -> None:
    x = torch.randn(6, 5, dtype=dtype).t().requires_grad_()  # not contiguous
    out = random.dropout(x, seeded(), 0, 0.4)
    grad = torch.randn(out.shape, dtype=dtype)
    out.backward(grad)
    torch.testing.assert_close(x.grad, torch.where(random.keep_mask(seeded(), 0, 0.4, x.shape), grad / 0.6, 0).to(dtype))


def test_dropout_differentiates_twice() -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: random.dropout(x, seeded(), 0, 0.4), x)
    assert torch.autograd.gradgradcheck(lambda x: random.dropout(x, seeded(), 0, 0.4), x)


def test_operators_are_registered_as_torch_wants() -> None:
    x = torch.randn(5, 7, requires_grad=True)
    torch.library.opcheck(ops.dropout.default, (x, seeded(), 0, 0.3, [35], [35], [0]))
    torch.library.opcheck(ops.dropout_backward.default, (x, x.detach() > 0, 0.3))
    torch.library.opcheck(ops.keep_mask.default, (seeded(), 0, 0.3, [5, 7], [5, 7], [0, 0]))
    torch.library.opcheck(ops.uniform.default, (seeded(), 0, [5, 7], [5, 7], [0, 0], torch.float32))
    torch.library.opcheck(ops.normal.default, (seeded(), 0, [5, 7], [5, 7], [0, 0], torch.float64))


def test_one_node_forward_and_one_backward() -> None:
    from functorch.compile import make_boxed_func
    from torch._functorch.aot_autograd import aot_function

    targets: list[str] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    x = torch.randn(4, 4, requires_grad=True)
    compiled = aot_function(lambda x, s: random.dropout(x * 2, s, 0, 0.5), fw_compiler=record, bw_compiler=record)
    compiled(x, seeded()).sum().backward()
    assert targets.count("meshc.dropout.default") == targets.count("meshc.dropout_backward.default") == 1
    assert len([target for target in targets if "bernoulli" in target or "where" in target]) == 0
    torch.testing.assert_close(x.grad, random.keep_mask(seeded(), 0, 0.5, x.shape) * 4.0)


# ------------------------------------------------------------------------------------------------------------------- the reference


def test_eager_dropout_is_meshc_dropout() -> None:
    x = torch.randn(8, 33, requires_grad=True)
    with ReferenceRandom(7, 2) as reference:
        first, second = F.dropout(x, 0.1), F.dropout(x, 0.6)
        F.dropout(x, 0.0), F.dropout(x, 1.0), F.dropout(x, 0.5, training=False)
        with torch.inference_mode():
            third = F.dropout(x, 0.1)
            F.dropout(x, 1.0)
    assert reference.calls == 3
    seed = random.seed_step(7, 2)
    torch.testing.assert_close(first, random.dropout(x, seed, 0, 0.1))
    torch.testing.assert_close(second, random.dropout(x, seed, 1, 0.6))
    torch.testing.assert_close(third, random.dropout(x, seed, 2, 0.1))
    (gradient,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(gradient, random.keep_mask(seed, 0, 0.1, x.shape) / 0.9)


def test_eager_dropout_of_a_transposed_tensor_counts_rows_of_the_view() -> None:
    x = torch.randn(9, 4).t()
    with ReferenceRandom(7):
        torch.testing.assert_close(F.dropout(x, 0.5), random.dropout(x, random.seed_step(7), 0, 0.5))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_dropout(causal: bool) -> None:
    q, k, v = (torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    with ReferenceRandom(1) as reference:
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=causal)
        F.scaled_dot_product_attention(q, k, v)
    assert reference.drawn == [("aten.bernoulli_.float", (2, 3, 5, 5))]
    scores = q @ k.transpose(-2, -1) / math.sqrt(8)
    if causal:
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    expected = random.dropout(scores.softmax(-1), random.seed_step(1), 0, 0.1) @ v
    torch.testing.assert_close(out, expected)
    for ours, theirs in zip(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_other_draws() -> None:
    seed, p = random.seed_step(3, 4), torch.rand(6)
    with ReferenceRandom(3, 4):
        assert torch.equal(torch.rand(2, 3), random.uniform(seed, 0, (2, 3)))
        assert torch.equal(torch.randn(5, dtype=torch.float64), random.normal(seed, 1, (5,), torch.float64))
        assert torch.equal(torch.rand_like(p, dtype=torch.bfloat16), random.uniform(seed, 2, (6,), torch.bfloat16))
        assert torch.equal(torch.randn_like(p), random.normal(seed, 3, (6,)))
        assert torch.equal(torch.empty(4).uniform_(-1, 3), random.uniform(seed, 4, (4,)) * 4.0 - 1.0)
        assert torch.equal(torch.empty(4).normal_(2.0, 0.5), random.normal(seed, 5, (4,)) * 0.5 + 2.0)
        assert torch.equal(torch.bernoulli(p), (random.uniform(seed, 6, (6,)) >= 1 - p).float())
        assert torch.equal(torch.empty(6).bernoulli_(0.25), random.keep_mask(seed, 7, 0.75, (6,)).float())
        assert torch.equal(torch.normal(p, p), random.normal(seed, 8, (6,)) * p + p)
        assert torch.equal(torch.native_dropout(p, 0.5, True)[1], random.keep_mask(seed, 9, 0.5, (6,)))


def test_what_has_no_definition_is_refused() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    with ReferenceRandom(0):
        for undefined in (lambda: torch.poisson(x.abs()), lambda: torch.empty(3).random_(), lambda: torch.rand(2, out=torch.empty(2))):
            with pytest.raises(MeshcError, match="does not define"):
                undefined()
        with pytest.raises(MeshcError, match="checkpointing"):
            checkpoint(lambda x: F.dropout(x, 0.5) * x, x, use_reentrant=False, preserve_rng_state=False).sum().backward()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.drop, self.channel, self.alpha = nn.Dropout(0.2), nn.Dropout1d(0.3), nn.AlphaDropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.alpha(self.channel(self.drop(torch.relu(self.first(x)))))
        h = F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], dropout_p=0.1)[:, 0]
        return self.second(h + torch.rand_like(h))


def test_a_small_model_and_its_gradients() -> None:
    torch.manual_seed(0)
    model, x, s = Small().double(), torch.randn(3, 4, 6, dtype=torch.float64), random.seed_step(5, 6)
    with ReferenceRandom(5, 6) as reference:
        out = model(x)
    assert [shape for _, shape in reference.drawn] == [(3, 4, 6), (3, 4, 1), (3, 4, 6), (3, 1, 4, 4), (3, 4, 6)]
    h = random.dropout(torch.relu(model.first(x)), s, 0, 0.2)
    h = RAISED[F.dropout1d](h, 0.3, seed_step=s, call=1)
    h = RAISED[F.alpha_dropout](h, 0.4, True, seed_step=s, call=2)
    h = random.dropout((h @ h.mT / math.sqrt(6)).softmax(-1)[:, None], s, 3, 0.1)[:, 0] @ h
    expected = model.second(h + RAISED[torch.rand_like](h, seed_step=s, call=4))
    torch.testing.assert_close(out, expected)
    parameters = list(model.parameters())
    for ours, theirs in zip(torch.autograd.grad(out.sum(), parameters), torch.autograd.grad(expected.sum(), parameters), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gpt2_draws_in_a_fixed_order() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=50, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(50, (2, 8))

    def run(step: int) -> tuple[Tensor, list[Tensor], ReferenceRandom]:
        torch.rand(3)  # torch's own generator has no part in it
        model.zero_grad()
        with ReferenceRandom(1, step) as reference:
            loss = model(ids, labels=ids).loss
        loss.backward()
        return loss, [parameter.grad.clone() for parameter in model.parameters()], reference

    loss, gradients, reference = run(0)
    layer = [(2, 4, 8, 8), (2, 8, 32), (2, 8, 32)]  # attention, its projection, the feed-forward
    assert [shape for _, shape in reference.drawn] == [(2, 8, 32), *layer, *layer]
    again, gradients_again, _ = run(0)
    assert torch.equal(loss, again) and all(map(torch.equal, gradients, gradients_again))
    other, _, _ = run(1)
    assert not torch.equal(loss, other)


# --------------------------------------------------------------------------------------------------------------- torch-level targets


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, num_layers=3, dropout=0.5)
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lstm(x)[0]
        x = self.attention(x, x, x)[0]
        x = F.dropout(F.dropout(F.dropout(x, 0.0), 1.0) + torch.randn(6), 0.1) + F.alpha_dropout(x, 0.3)
        return x.bernoulli_(0.5) * F.scaled_dot_product_attention(x, x, x, dropout_p=0.2)


def test_draws_counts_what_the_reference_sees() -> None:
    class Count(torch.overrides.TorchFunctionMode):
        total, depth = 0, 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.total += draws(func, args, kwargs)
            return func(*args, **(kwargs or {}))

    with ReferenceRandom(0) as reference, Count() as count:
        model = Several()
        before, count.total = reference.calls, 0
        model(torch.randn(4, 3, 6))
    assert count.total == reference.calls - before == 2 + 1 + 1 + 1 + 1 + 1 + 1


def test_is_random() -> None:
    for target in (F.dropout, torch.rand, torch.bernoulli, torch.randperm, "bernoulli_", torch.Tensor.normal_, F.dropout3d):
        assert is_random(target)
    for target in (F.relu, torch.add, "view", torch.Tensor.view, F.scaled_dot_product_attention, torch.zeros):
        assert not is_random(target)
    assert draws(F.scaled_dot_product_attention, (0, 0, 0), {"dropout_p": 0.1}) == 1
    assert draws(F.dropout, (0, 0.1, False)) == draws(F.dropout, (0, 1.0)) == draws(F.alpha_dropout, (0, 0.1)) == 0
    assert draws(F.dropout, (0, 0.1)) == draws(torch.dropout, (0, 0.1, True)) == draws(torch.native_dropout, (0, 0.0, True)) == 1


RAISED_CALLS = [
    (F.dropout, (0.3,), {}),
    (torch.dropout, (0.3, True), {}),
    (F.dropout1d, (0.3,), {}),
    (F.dropout2d, (0.3,), {}),
    (torch.feature_dropout, (0.3, True), {}),
    (F.alpha_dropout, (0.3, True), {}),
    (torch.native_dropout, (0.3, True), {}),
    (torch.rand_like, (), {}),
    (torch.randn_like, (), {"dtype": torch.float64}),
    (torch.bernoulli, (0.25,), {}),
]


@pytest.mark.parametrize(("target", "args", "kwargs"), RAISED_CALLS)
def test_raised_functions_mean_what_the_reference_draws(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x = torch.randn(2, 3, 4)
    with warnings.catch_warnings(), ReferenceRandom(1, 2) as reference:
        warnings.simplefilter("ignore")  # dropout2d on three dims
        expected = target(x, *args, **kwargs)
    assert reference.calls == 1
    ours = RAISED[target](x, *args, **kwargs, seed_step=random.seed_step(1, 2), call=0)
    if target is torch.native_dropout:
        expected, ours = expected[0], ours[0]
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("target", [F.dropout1d, F.dropout3d])
def test_raised_channel_dropout_without_batch(target: Any) -> None:
    x = torch.ones(3, 4) if target is F.dropout1d else torch.ones(3, 4, 2, 2)
    with ReferenceRandom(1):
        expected = target(x, 0.5)
    torch.testing.assert_close(RAISED[target](x, 0.5, seed_step=random.seed_step(1), call=0), expected)


# ----------------------------------------------------------------------------------------------------------------------- the build


def test_the_build_is_cached_and_named_by_its_source(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHC_CACHE", str(tmp_path / "cache"))

    def built() -> list[Any]:
        philox._compiled()
        return sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "cache").glob("*.so"))

    first = built()
    assert len(first) == 1 and built() == first
    changed = tmp_path / "philox.cpp"
    changed.write_text(philox.SOURCE.read_text() + "\n// changed\n")
    monkeypatch.setattr(philox, "SOURCE", changed)
    assert len(built()) == 2 and first[0] in built()


def test_no_compiler_warns_once_with_the_price(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    philox.library.cache_clear()
    philox._warn_once.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="cost: about 60 ns") as caught:
            drawn = random.uniform(random.seed_step(0, 0), 0, (4,)), random.uniform(random.seed_step(0, 0), 0, (4,))
        assert len(caught) == 1
    finally:
        monkeypatch.undo()
        philox.library.cache_clear()
        philox._warn_once.cache_clear()
    assert torch.equal(drawn[0], random.uniform(random.seed_step(0, 0), 0, (4,)))


TILES = [((1000,), (1000,), (0,)), ((50, 60, 64), (7, 13, 32), (3, 4, 32)), ((50, 60, 70), (7, 13, 3), (3, 4, 5))]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", TILES)
def test_cuda_draws_the_same_bits(shape: tuple[tuple[int, ...], ...]) -> None:
    here, there = seeded(), seeded().cuda()
    for dtype in FLOATS:
        assert torch.equal(ops.uniform(here, 1, *shape, dtype), ops.uniform(there, 1, *shape, dtype).cpu())
        assert torch.equal(ops.normal(here, 1, *shape, dtype), ops.normal(there, 1, *shape, dtype).cpu())
        x = torch.randn(shape[1]).to(dtype)
        ours, theirs = ops.dropout(x, here, 1, 0.1, *shape), ops.dropout(x.cuda(), there, 1, 0.1, *shape)
        assert torch.equal(ours[0], theirs[0].cpu()) and torch.equal(ours[1], theirs[1].cpu())
        assert torch.equal(ops.dropout_backward(x, ours[1], 0.1), ops.dropout_backward(x.cuda(), theirs[1], 0.1).cpu())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_attention_dropout_needs_the_math_kernel() -> None:
    q = torch.randn(2, 3, 16, 16, device="cuda", dtype=torch.float16)
    with ReferenceRandom(0), pytest.raises(MeshcError, match="SDPBackend.MATH"):
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
    with ReferenceRandom(0) as reference, sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
    assert reference.calls == 1
