"""First values made on the mesh: each rank computes its part, and together they are what one device gives."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import meshc
from tests.processes.session import device_mesh

TOKENS = torch.arange(24).view(4, 6) % 31
INPUTS = {"input_ids": TOKENS, "labels": TOKENS}


def llama(tied: bool = True) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        pad_token_id=3, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def run(mesh: str, *names: str) -> None:
    dist.init_process_group("gloo")
    for name in names:
        globals()[name](device_mesh(mesh))
        print(name)
    dist.barrier()
    dist.destroy_process_group()


def _program(model: nn.Module, mesh: Any, **options: Any) -> Any:
    step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()))
    return meshc.compile(step, mesh, kwargs=INPUTS, options=meshc.Options(seed=11, **options))


def stock(mesh: Any) -> None:
    """A stock model from `meta`: parameters, rotary tables, the row of padding; and anew, after a step."""
    model = on_meta(lambda: llama(tied=False))
    program = _program(model, mesh)
    program.init_weights()
    one = on_meta(lambda: llama(tied=False))
    meshc.init_weights(one, seed=11)
    wanted = one.state_dict()
    assert wanted["model.embed_tokens.weight"][3].eq(0).all() and wanted["model.embed_tokens.weight"][4].ne(0).all()

    def compare() -> None:
        found = program.store.whole_model()
        for name, value in found.items():  # {} but on rank 0
            assert torch.equal(value, wanted[name]), name

    compare()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, one.get_buffer(name)), name
    with torch.no_grad():
        loss = one(**INPUTS).loss
    assert torch.allclose(program(**INPUTS), loss, rtol=1e-5, atol=0)
    assert not any(torch.equal(value, wanted[name]) for name, value in program.store.whole_model().items() if name.endswith("proj.weight"))
    program.init_weights()
    compare()


def halves(mesh: Any) -> None:
    """What the function leaves alone stays, and what it reads is there; what differs between ranks, or is left out, is refused."""
    model = on_meta(llama)
    program = _program(model, mesh)
    with pytest.raises(meshc.StateError, match=r"left without values: (buffer )?model"):
        program.init_weights(lambda whole: nn.init.ones_(whole.model.norm.weight))
    with pytest.raises(meshc.StateError, match=r"something else on rank 1 than on rank 0"):
        program.init_weights(lambda whole: nn.init.constant_(whole.model.norm.weight, float(dist.get_rank())))
    with pytest.raises(meshc.StateError, match=r"failed on rank 0\n  why: ZeroDivisionError"):
        program.init_weights(lambda whole: 1 / 0)
    program.init_weights()
    before = program.store.whole_model()

    def halve(whole: Any) -> None:
        whole.model.layers[1].mlp.up_proj.weight.mul_(0.5)
        whole.model.layers[0].mlp.down_proj.weight.copy_(whole.model.layers[1].mlp.down_proj.weight * 2)

    with torch.no_grad():
        program.init_weights(halve)
    for name, value in program.store.whole_model().items():
        changed = {"layers.1.mlp.up_proj": before[name] * 0.5, "layers.0.mlp.down_proj": before[name.replace("layers.0", "layers.1")] * 2}
        wanted = next((wanted for part, wanted in changed.items() if part in name), before[name])
        assert torch.equal(value, wanted), name


class Wide(nn.Module):
    """Six layers, of which none may be made whole on a rank."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.mean()


def bytes_held(mesh: Any) -> None:
    """Beyond its own part a rank holds, at the peak, no more than its part of the largest tensor and what is computed at a time."""
    from meshc.frontend import recorded_values
    from tests.processes.live_bytes import LiveBytes

    model = on_meta(Wide)
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    program = meshc.compile(step, mesh, plan="dp_shard: batch; store params, grads, state", args=(torch.randn(4, 512),))
    largest = 512 * 512 * 4
    recorded_values.CHUNK_BYTES = largest // 32  # type: ignore[misc]  # as a chunk is small beside a layer of a large model
    gc.collect()
    with LiveBytes() as live:
        program.init_weights()
    own = sum(parameter.to_local().numel() * 4 for parameter in model.parameters())
    assert own <= 6 * largest // 2 + 6 * 512 * 4
    assert largest // 2 < live.peak <= largest // 2 + 8 * largest // 32, live.peak / largest
