"""Plain torch models of the zoo, as people write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import Case, resnet

BATCH = 4


class Seq2Seq(nn.Module):
    """`torch.nn.Transformer` between embeddings and a head."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocab, width), nn.Embedding(vocab, width)
        self.transformer = nn.Transformer(width, 4, 2, 2, 72, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, source: Tensor, shifted: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(shifted.shape[1])
        return self.head(self.transformer(self.source(source), self.target(shifted), tgt_mask=mask, tgt_is_causal=True)).flatten(0, 1)


class Tagger(nn.Module):
    """A bidirectional LSTM of two layers over words."""

    def __init__(self, vocab: int, width: int, tags: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, tags)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.lstm(self.words(words))[0]).flatten(0, 1)


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU(),
        )  # fmt: skip


class UNet(nn.Module):
    """Two levels down and up again, with skips, group norm and a transposed convolution."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.enter, self.down, self.bottom = DoubleConv(3, width), DoubleConv(width, 2 * width), DoubleConv(2 * width, 4 * width)
        self.pool = nn.MaxPool2d(2)
        self.up2, self.join2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2), DoubleConv(4 * width, 2 * width)
        self.up1, self.join1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2), DoubleConv(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        a = self.enter(images)
        b = self.down(self.pool(a))
        c = self.bottom(self.pool(b))
        b = self.join2(torch.cat([self.up2(c), b], dim=1))
        return self.head(self.join1(torch.cat([self.up1(b), a], dim=1)))


class MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(MixerBlock(16, width), MixerBlock(16, width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.stem(images).flatten(2).transpose(1, 2))
        return self.head(self.norm(x).mean(1))


class GraphNetwork(nn.Module):
    """Messages along edges, gathered by source and added up by target."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.enter = nn.Linear(features, width)
        self.message = nn.ModuleList(nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(2))
        self.head = nn.Linear(width, classes)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = self.enter(nodes)
        source, target = edges[0], edges[1]
        for message in self.message:
            sent = message(torch.cat([x[source], x[target]], dim=-1))
            index = target[:, None].expand_as(sent)
            x = F.relu(x + torch.zeros_like(x).scatter_add(0, index, sent))
        return self.head(x)


class Recommender(nn.Module):
    """DLRM: embedding bags for categories, an MLP for numbers, products of all pairs, an MLP on top."""

    def __init__(self, rows: tuple[int, ...], numbers: int, width: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(count, width, mode="sum") for count in rows)
        self.bottom = nn.Sequential(nn.Linear(numbers, 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.ReLU())
        features = len(rows) + 1
        pairs = features * (features - 1) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 2 * width), nn.ReLU(), nn.Linear(2 * width, 1))
        self.register_buffer("upper", torch.triu_indices(features, features, 1), persistent=False)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        found = [dense, *(bag(categories[:, index]) for index, bag in enumerate(self.bags))]
        stacked = torch.stack(found, dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        pairs = products[:, self.upper[0], self.upper[1]]
        return self.top(torch.cat([dense, pairs], dim=1)).squeeze(-1)


def seq2seq() -> Case:
    source, shifted = torch.randint(65, (BATCH, 12)), torch.randint(65, (BATCH, 10))
    return _case("transformer", Seq2Seq(65, 32), {"source": source, "shifted": shifted}, F.cross_entropy, torch.randint(65, (BATCH * 10,)))


def lstm() -> Case:
    return _case("lstm", Tagger(65, 32, 9), {"words": torch.randint(65, (BATCH, 6))}, F.cross_entropy, torch.randint(9, (BATCH * 6,)))


def unet() -> Case:
    return _case("unet", UNet(8, 5), {"images": torch.randn(BATCH, 3, 16, 16)}, F.cross_entropy, torch.randint(5, (BATCH, 16, 16)))


def mixer() -> Case:
    return _case("mixer", Mixer(32, 7), {"images": torch.randn(BATCH, 3, 16, 16)}, F.cross_entropy, torch.randint(7, (BATCH,)))


def graph_network() -> Case:
    nodes, edges = torch.randn(10, 12), torch.randint(10, (2, 24))
    return _case("graph network", GraphNetwork(12, 32, 5), {"nodes": nodes, "edges": edges}, F.cross_entropy, torch.randint(5, (10,)))


def recommender() -> Case:
    inputs = {"numbers": torch.randn(BATCH, 13), "categories": torch.stack([torch.randint(n, (BATCH, 3)) for n in (20, 30, 11)], dim=1)}
    return _case("dlrm", Recommender((20, 30, 11), 13, 16), inputs, F.binary_cross_entropy_with_logits, torch.rand(BATCH))


def _case(name: str, model: nn.Module, inputs: dict[str, Tensor], loss: Callable[..., Tensor], target: Tensor) -> Case:
    return Case(name, model.train(), inputs, loss, {"target": target})


PLAIN: Final[dict[str, Callable[[], Case]]] = {
    "transformer": seq2seq,
    "lstm": lstm,
    "unet": unet,
    "resnet": lambda: resnet(batch=BATCH, width=8),
    "mixer": mixer,
    "graph_network": graph_network,
    "dlrm": recommender,
}
