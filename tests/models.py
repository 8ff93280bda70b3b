"""The models that every end-to-end check runs: small, seeded, and as their authors wrote them.

Each factory returns a `Case`. Sizes are odd where that costs nothing (a vocabulary of 65, 17 image tokens, three ignored labels), since a
split that divides evenly hides mistakes. Models are in training mode, and dropout is on where the stock configuration has it on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

IGNORED = -100  # the label that cross-entropy leaves out


@dataclass
class Case:
    """A model with the inputs of one call.

    `kwargs` go to the model. With `loss` None the model computes its own loss (`output.loss`); otherwise the loss is
    `loss(output, **target_kwargs)`. `names` names input dims where meshc's conventions do not.
    """

    name: str
    model: nn.Module
    kwargs: dict[str, Tensor]
    loss: Callable[..., Tensor] | None = None
    target_kwargs: dict[str, Tensor] = field(default_factory=dict)
    names: dict[str, tuple[str, ...]] | None = None

    @property
    def call_kwargs(self) -> dict[str, Tensor]:
        """What a train step over this case is called with: the model's inputs and the loss's targets."""
        return {**self.kwargs, **self.target_kwargs}

    def loss_of(self, output: Any) -> Tensor:
        return output.loss if self.loss is None else self.loss(output, **self.target_kwargs)


def llama(dtype: torch.dtype = torch.float32, batch: int = 6, seq: int = 12, hidden: int = 32, layers: int = 2) -> Case:
    """Grouped-query attention (4 heads, 2 of them for keys and values), rotary positions, gated feed-forward."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=65,
        hidden_size=hidden,
        intermediate_size=2 * hidden + 24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    ids = torch.randint(config.vocab_size, (batch, seq))
    return _case("llama", LlamaForCausalLM(config), dtype, {"input_ids": ids, "labels": _with_ignored(ids)})


def gpt2(dtype: torch.dtype = torch.float32, batch: int = 6, seq: int = 12, hidden: int = 32, layers: int = 2) -> Case:
    """Query, key and value in one weight (`c_attn`), tied embedding and head, dropout 0.1 in five places."""
    torch.manual_seed(2)
    config = GPT2Config(vocab_size=65, n_positions=32, n_embd=hidden, n_layer=layers, n_head=4, bos_token_id=0, eos_token_id=0)
    ids = torch.randint(config.vocab_size, (batch, seq))
    return _case("gpt2", GPT2LMHeadModel(config), dtype, {"input_ids": ids, "labels": _with_ignored(ids)})


def bert(
    dtype: torch.dtype = torch.float32, batch: int = 6, seq: int = 12, hidden: int = 32, layers: int = 2, padded: bool = False
) -> Case:
    """Bidirectional attention, biases everywhere, dropout 0.1. Only masked tokens have a label; `padded` adds an attention mask."""
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=67,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=2 * hidden + 8,
        max_position_embeddings=32,
    )
    ids = torch.randint(1, config.vocab_size, (batch, seq))
    masked = torch.rand(batch, seq) < 0.3
    masked[:, 0] = True
    labels = torch.where(masked, ids, IGNORED)
    kwargs = {"input_ids": torch.where(masked, 1, ids), "labels": labels}
    if padded:
        kwargs["attention_mask"] = (torch.arange(seq) < seq - torch.arange(batch)[:, None] % 4).long()
    return _case("bert", BertForMaskedLM(config), dtype, kwargs)


def vit(dtype: torch.dtype = torch.float32, batch: int = 6, hidden: int = 32, layers: int = 2) -> Case:
    """16x16 images in patches of 4, so that a class token makes 17 tokens."""
    torch.manual_seed(4)
    config = ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=2 * hidden + 8,
        num_labels=7,
    )
    images, labels = torch.randn(batch, 3, 16, 16), torch.randint(config.num_labels, (batch,))
    return _case("vit", ViTForImageClassification(config), dtype, {"pixel_values": images, "labels": labels})


def resnet(dtype: torch.dtype = torch.float32, batch: int = 8, width: int = 8) -> Case:
    """Batch norm over batch and pixels, so that a split batch needs its statistics from the other ranks."""
    torch.manual_seed(5)
    images, target = torch.randn(batch, 3, 16, 16), torch.randint(10, (batch,))
    return _case("resnet", ResNet(width, classes=10), dtype, {"images": images}, F.cross_entropy, {"target": target})


def mlp(dtype: torch.dtype = torch.float32, batch: int = 6, width: int = 40) -> Case:
    torch.manual_seed(6)
    x, target = torch.randn(batch, 24), torch.randint(10, (batch,))
    return _case("mlp", MLP(24, width, 10), dtype, {"x": x}, F.cross_entropy, {"target": target})


def nanogpt(
    dtype: torch.dtype = torch.float32,
    batch: int = 6,
    seq: int = 12,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    dropout: float = 0.0,
    tied: bool = True,
    vocab: int = 65,
) -> Case:
    """A decoder as people write it by hand: one projection cut by `split`, `scaled_dot_product_attention`, its own loss."""
    torch.manual_seed(7)
    ids = torch.randint(vocab, (batch, seq + 1))
    model = NanoGPT(vocab, seq, hidden, layers, heads, dropout, tied)
    return _case("nanogpt", model, dtype, {"idx": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}, _second_output)


FACTORIES: dict[str, Callable[..., Case]] = {
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "resnet": resnet,
    "mlp": mlp,
    "nanogpt": nanogpt,
}
"""The six kinds that the support matrix is made of, and the hand-written decoder."""

FLOAT32_INSIDE = ("llama", "gpt2")
"""Kinds whose stock code computes some values in float32 whatever the model's dtype: the loss of both, Llama's norms and rotary tables."""


class MLP(nn.Module):
    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.up = nn.Linear(features, width)
        self.middle = nn.Linear(width, width)
        self.down = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.middle(F.gelu(self.up(self.norm(x))))))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions; a 1x1 convolution on the way round where width or size change."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(h)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            ResidualBlock(width, width, stride=1), ResidualBlock(width, 2 * width, stride=2), ResidualBlock(2 * width, 2 * width, stride=1)
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        h = self.blocks(F.relu(self.bn(self.conv(images))))
        return self.head(torch.flatten(self.pool(h), 1))


class CausalSelfAttention(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.c_attn = nn.Linear(hidden, 3 * hidden)
        self.c_proj = nn.Linear(hidden, hidden)
        self.residual_dropout = nn.Dropout(dropout)
        self.hidden, self.heads, self.dropout = hidden, heads, dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.size()
        q, k, v = self.c_attn(x).split(self.hidden, dim=2)
        q = q.view(batch, seq, self.heads, hidden // self.heads).transpose(1, 2)
        k = k.view(batch, seq, self.heads, hidden // self.heads).transpose(1, 2)
        v = v.view(batch, seq, self.heads, hidden // self.heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.residual_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(batch, seq, hidden)))


class DecoderBlock(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden)
        self.attn = CausalSelfAttention(hidden, heads, dropout)
        self.ln_2 = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """Returns (logits, loss); the loss is None without targets."""

    def __init__(self, vocab: int, seq: int, hidden: int, layers: int, heads: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, hidden)
        self.wpe = nn.Embedding(seq, hidden)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(DecoderBlock(hidden, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        self.apply(_init_small)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        positions = torch.arange(idx.size(1), device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def _init_small(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _second_output(output: tuple[Tensor, Tensor]) -> Tensor:
    return output[1]


def _with_ignored(ids: Tensor) -> Tensor:
    """Labels with three ignored tokens, all in the first two rows: a mean over tokens is then no mean of the ranks' means."""
    labels = ids.clone()
    labels[0, 2] = labels[0, -1] = labels[1, 5] = IGNORED
    return labels


def _case(
    name: str,
    model: nn.Module,
    dtype: torch.dtype,
    kwargs: dict[str, Tensor],
    loss: Callable[..., Tensor] | None = None,
    targets: dict[str, Tensor] | None = None,
) -> Case:
    cast = {key: value.to(dtype) if value.is_floating_point() else value for key, value in kwargs.items()}
    return Case(name, model.to(dtype).train(), cast, loss, targets or {})
