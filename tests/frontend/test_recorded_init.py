"""A recorded function gives, box by box, what it gives on one device; and no more than what is asked for is computed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import meshc
from meshc.errors import StateError
from meshc.frontend import recorded_values
from meshc.frontend.model_init import initialise
from meshc.frontend.recorded_init import Recording
from meshc.frontend.recorded_values import Geometry, contiguous, ranges_of
from meshc.ops.random import FIRST_VALUES

SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
STOCK: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, pad_token_id=3, **SMALL)),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=32, **SMALL)),
    "vit": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(image_size=8, patch_size=4, **SMALL)),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
    ),
    "torch": lambda: nn.Sequential(
        nn.Embedding(10, 6, padding_idx=2), nn.Conv2d(4, 6, 3), nn.LSTM(6, 8), nn.MultiheadAttention(8, 2), nn.BatchNorm1d(4),
        nn.Bilinear(3, 4, 5), nn.TransformerEncoderLayer(8, 2, 16),
    ),
}  # fmt: skip


class Odd(nn.Module):
    """First values of every kind: whole matrices, what looks at values, rows, steps, `.data`, draws and tables made on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 4), nn.Linear(4, 6), nn.Linear(5, 7)
        self.d, self.e, self.f = nn.Conv2d(3, 3, 3), nn.Linear(8, 8), nn.Linear(4, 4)

    def init_weights(self) -> None:
        nn.init.orthogonal_(self.c.weight)
        nn.init.trunc_normal_(self.a.weight, std=1.0, a=-1, b=1)
        nn.init.sparse_(self.e.weight, 0.3)
        nn.init.eye_(self.f.weight)
        nn.init.dirac_(self.d.weight)
        self.a.bias.data = torch.arange(4.0) * 0.1
        self.b.weight.data.uniform_(-1, 1)
        self.b.weight.data[1:3, 2:] *= 2
        with torch.no_grad():
            self.b.bias.copy_(torch.randn(6))
            self.c.bias.copy_(self.a.weight.sum() + torch.rand_like(self.c.bias))
            self.d.bias.fill_(float(self.b.bias.mean()))
            self.e.bias[::2] = 1.0
            self.e.bias[1::2] = self.e.bias[::2] * 3
            low, high = math.log(0.001), math.log(0.1)
            self.f.bias.copy_(torch.exp(torch.rand(4) * (high - low) + low).clamp(min=1e-4))


def recorded(make: Callable[[], nn.Module], fn: Callable[[nn.Module], object] = initialise) -> tuple[Recording, dict[str, Tensor]]:
    """A model of tensors without memory, after the function."""
    with torch.device("meta"):
        model = make()
    recording, known = Recording(3, FIRST_VALUES), {}
    for module in model.modules():
        for members in (module._parameters, module._buffers):
            for name, tensor in members.items():
                if tensor is not None:
                    if id(tensor) not in known:
                        plain: Tensor = recording.tensor(len(known), tensor.shape, tensor.dtype)
                        known[id(tensor)] = (nn.Parameter(plain) if isinstance(tensor, nn.Parameter) else plain), tensor
                    members[name] = known[id(tensor)][0]  # type: ignore[assignment]
    with recording:
        fn(model)
    return recording, dict(itertools.chain(model.named_parameters(), model.named_buffers()))


@pytest.mark.parametrize("make", [*STOCK.values(), Odd], ids=[*STOCK, "odd"])
def test_each_box_is_that_of_one_device(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_values, "CHUNK_BYTES", 128)
    with torch.device("meta"):
        one = make()
    meshc.init_weights(one, seed=3)
    recording, found = recorded(make)
    for name, wanted in itertools.chain(one.named_parameters(), one.named_buffers()):
        value = recording.value(found[name])
        assert torch.equal(recording.compute_box(value), wanted), name
        if wanted.dim() and min(wanted.shape) > 1:
            box = tuple((size // 3, size - size // 4) for size in wanted.shape)
            assert torch.equal(recording.compute_box(value, box), wanted[tuple(slice(*pair) for pair in box)]), name
        recording.evaluation.forget()


def test_a_part_costs_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    draw = torch.ops.meshc.normal
    monkeypatch.setattr(torch.ops.meshc, "normal", lambda *args: drawn.append(math.prod(args[3])) or draw(*args))

    def fill(model: Any) -> None:
        nn.init.normal_(model.weight)
        model.weight.data[2].zero_()
        model.weight.data.mul_(2.0)

    recording, found = recorded(lambda: nn.Linear(64, 64), fill)
    assert drawn == []
    part = recording.compute_box(found["weight"], ((0, 4), (8, 16)))
    assert sum(drawn) == 4 * 8
    assert part[2].eq(0).all() and part[3].ne(0).all()


def test_what_two_ranks_do_differently_shows() -> None:
    def digest(number: float) -> str:
        recording, found = recorded(lambda: nn.Linear(2, 2), lambda model: nn.init.constant_(model.get_parameter("weight"), number))
        return recording.digest([recording.value(found["weight"])])

    assert digest(1.0) == digest(1.0) != digest(2.0)


def test_values_left_out_and_shapes_in_place_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(StateError, match="left without values: bias"):
        meshc.init_weights(model, lambda module: nn.init.ones_(module.get_parameter("weight")))
    with pytest.raises(StateError, match="changes the shape of a tensor in place"):
        recorded(lambda: nn.Linear(2, 3), lambda model: model.get_parameter("weight").data.t_())
    with pytest.raises(StateError, match=r"`.data` of a torch.float32 tensor of shape \[3\] was given one of torch.float32 \[4\]"):
        recorded(lambda: nn.Linear(2, 3), lambda model: setattr(model.get_parameter("bias"), "data", torch.zeros(4)))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[3], lambda x: x[:, 1], lambda x: x[1:3, 2:4], lambda x: x[2:3], lambda x: x.t(), lambda x: x[::2],
        lambda x: x.diagonal(), lambda x: x.view(-1), lambda x: x.view(-1)[1:3], lambda x: x.view(-1)[2:7],
        lambda x: x[4, 3], lambda x: x[:0],
    ],
)  # fmt: skip
def test_ranges_of_a_view(view: Callable[[Tensor], Tensor]) -> None:
    base = torch.arange(20).view(5, 4)
    seen = view(base)
    ranges = ranges_of(Geometry.of(base), Geometry.of(seen))
    if ranges is None:
        assert not seen.is_contiguous() or seen.dim() == 1 and len(seen) > 4
    else:
        assert torch.equal(base[tuple(slice(start, stop) for start, stop, _ in ranges)].reshape(seen.shape), seen)
    assert contiguous(base.shape) == base.stride()
