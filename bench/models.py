"""The models that the benchmarks train, each with its data, from fixed seeds.

Dropout is off: peers draw other random numbers than meshc, and every row must show the single process's losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

Batch = dict[str, Tensor]

VOCAB = 256  # bytes


@dataclass(frozen=True)
class Workload:
    """A model and its training data.

    Dim 0 of every tensor of a batch is the batch. Without `loss` the model returns its loss, or an output that has `.loss`; with it, the
    batch's "target" goes to `loss(output, target=...)` and the rest to the model, as `meshc.TrainStep` does it.
    """

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], Batch]
    loss: Callable[..., Tensor] | None = None

    def batches(self, count: int) -> list[Batch]:
        """Global batches, the same on every rank and every call."""
        generator = torch.Generator().manual_seed(1)
        return [self.draw(generator) for _ in range(count)]

    def loss_of(self, model: nn.Module, batch: Batch) -> Tensor:
        if self.loss is None:
            output = model(**batch)
            return output if isinstance(output, Tensor) else output.loss
        inputs = {name: value for name, value in batch.items() if name != "target"}
        return self.loss(model(**inputs), target=batch["target"])


def _llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        use_cache=False,  # training fills no cache; a peer would otherwise pay for one at each step
    )
    return LlamaForCausalLM(config)


def _llama_batch(generator: torch.Generator) -> Batch:
    ids = torch.randint(VOCAB, (8, 128), generator=generator)
    return {"input_ids": ids, "labels": ids}


GPT_HIDDEN, GPT_HEADS, GPT_LAYERS, GPT_SEQ = 384, 6, 6, 256


class FusedAttention(nn.Module):
    """Query, key and value in one weight, cut by `split`."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(hidden, 3 * hidden)
        self.c_proj = nn.Linear(hidden, hidden)
        self.hidden, self.heads = hidden, heads

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        q, k, v = (part.view(batch, seq, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(self.hidden, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, seq, hidden))


class SplitAttention(nn.Module):
    """What `parallelize_module` needs instead of `FusedAttention`: three weights, and no head count or hidden size in `forward`."""

    def __init__(self, fused: FusedAttention) -> None:
        super().__init__()
        hidden = fused.hidden
        self.q, self.k, self.v = (nn.Linear(hidden, hidden) for _ in range(3))
        self.c_proj = fused.c_proj
        self.head_size = hidden // fused.heads
        with torch.no_grad():
            for index, part in enumerate((self.q, self.k, self.v)):
                part.weight.copy_(fused.c_attn.weight[index * hidden : (index + 1) * hidden])
                part.bias.copy_(fused.c_attn.bias[index * hidden : (index + 1) * hidden])

    def forward(self, x: Tensor) -> Tensor:
        batch, seq = x.shape[:2]
        q, k, v = (part(x).view(batch, seq, -1, self.head_size).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, seq, -1))


class FeedForward(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, width)
        self.down = nn.Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class DecoderBlock(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden)
        self.attn: nn.Module = FusedAttention(hidden, heads)
        self.ln_2 = nn.LayerNorm(hidden)
        self.mlp = FeedForward(hidden, 4 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Decoder(nn.Module):
    """nanoGPT's shape: learned positions, fused QKV, embedding and head tied. Called with targets it returns the loss."""

    def __init__(self, layers: int = GPT_LAYERS, seq: int = GPT_SEQ) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, GPT_HIDDEN)
        self.wpe = nn.Embedding(seq, GPT_HIDDEN)
        self.h = nn.ModuleList(DecoderBlock(GPT_HIDDEN, GPT_HEADS) for _ in range(layers))
        self.ln_f = nn.LayerNorm(GPT_HIDDEN)
        self.lm_head = nn.Linear(GPT_HIDDEN, VOCAB, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.wte(ids) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))


def _decoder(layers: int = GPT_LAYERS, seq: int = GPT_SEQ) -> nn.Module:
    torch.manual_seed(0)
    return Decoder(layers, seq)


def _decoder_batch(generator: torch.Generator, rows: int = 4, seq: int = GPT_SEQ) -> Batch:
    ids = torch.randint(VOCAB, (rows, seq + 1), generator=generator)
    return {"ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


LONG_LAYERS, LONG_SEQ = 2, 4096


def _mixtral() -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=512)
    routing = dict(num_local_experts=8, num_experts_per_tok=2)
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCAB, num_hidden_layers=3, use_cache=False, **sizes, **routing))


class WideMLP(nn.Module):
    """Two pairs of wide and narrow, each what Megatron splits by columns and then by rows."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.first = FeedForward(features, width)
        self.second = FeedForward(features, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))


def _wide_mlp() -> nn.Module:
    torch.manual_seed(0)
    return WideMLP(1024, 4096)


def _wide_mlp_batch(generator: torch.Generator) -> Batch:
    return {"x": torch.randn(128, 1024, generator=generator), "target": torch.randn(128, 1024, generator=generator)}


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(
            "llama",
            _llama,
            _llama_batch,
        ),
        Workload(
            "nanogpt",
            _decoder,
            _decoder_batch,
        ),
        Workload(
            "nanogpt8",  # for eight microbatches
            _decoder,
            partial(_decoder_batch, rows=8),
        ),
        Workload(
            "long",
            partial(_decoder, LONG_LAYERS, LONG_SEQ),
            partial(_decoder_batch, rows=1, seq=LONG_SEQ),
        ),
        Workload(
            "mixtral",
            _mixtral,
            _llama_batch,
        ),
        Workload(
            "mlp",
            _wide_mlp,
            _wide_mlp_batch,
            F.mse_loss,
        ),
    )
}
