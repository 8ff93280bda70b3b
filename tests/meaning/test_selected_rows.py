"""Rows that a mask selects, h[mask], in forms that end: in a sum, a mean, a loss, or where they were. On one device and split, with as many
rows on one rank as on no other, and with none; outputs and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.errors import CaptureError
from tests.meaning.checks import module_means_itself, step_means_itself

KEPT = {
    "some": torch.tensor([[1, 0, 1], [0, 0, 1], [0, 0, 0], [0, 1, 0]]).bool(),
    "one rank's": torch.tensor([[1, 0, 1], [1, 1, 1], [0, 0, 0], [0, 0, 0]]).bool(),
    "none": torch.zeros(4, 3, dtype=torch.bool),
}
MESHES = ["dp=2", "tp=2", "dp=2,tp=2"]


class Model(nn.Module):
    def __init__(self, form: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up, self.head, self.norm, self.scale = nn.Linear(6, 6), nn.Linear(6, 5), nn.LayerNorm(6), nn.Parameter(torch.randn(6))
        self.table, self.gate = nn.Embedding(5, 6), nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.form = form

    def forward(self, x: Tensor, keep: Tensor, labels: Tensor) -> Tensor:
        return self.form(self, x, keep, labels)


def losses(m: Model, x: Tensor, keep: Tensor, labels: Tensor) -> Tensor:
    logits, wanted = m.head(m.up(x)), torch.where(keep, labels, -100)
    first = F.cross_entropy(logits[wanted != -100], wanted[wanted != -100])
    kept, classes = logits[keep], labels[keep]
    weighted = F.cross_entropy(kept, classes, weight=torch.arange(1.0, 6.0, dtype=x.dtype), label_smoothing=0.1, ignore_index=2)
    return first + weighted + F.cross_entropy(kept, classes, reduction="none").sum() + F.nll_loss(kept.log_softmax(-1), classes)


def regressions(m: Model, x: Tensor, keep: Tensor, labels: Tensor) -> Tensor:
    h, t = m.up(x)[keep], x[keep]
    same = F.mse_loss(m.up(x)[keep & (labels > 0)], x[keep & (labels > 0)])
    found = same + F.mse_loss(h, t) + F.l1_loss(h, t, reduction="sum") + F.smooth_l1_loss(h.view(-1), t.flatten())
    found = found + F.binary_cross_entropy_with_logits(h[:, 1], t[:, 0].sigmoid())
    found = found + F.cosine_embedding_loss(h, t, torch.ones(1, dtype=x.dtype))
    return found + F.kl_div(h.log_softmax(-1), t.softmax(-1), reduction="batchmean")


def sums(m: Model, x: Tensor, keep: Tensor, labels: Tensor) -> Tensor:
    h = m.up(x)
    error = (m.up(m.norm(h[keep]) * m.scale) - x[keep]) ** 2
    per_row = F.softmax(error, dim=-1).max(-1).values + m.table(labels[keep]).topk(2, dim=-1)[0].sum(-1)
    whole = error.sum() / max(error.shape[0], 1) + per_row.mean() + error.mean(0).sum() + error.sum(0, keepdim=True).mean()
    return whole + (error.sum(-1)).sum() / error.numel() + h.masked_select(x > 0).mean()


def back(m: Model, x: Tensor, keep: Tensor, labels: Tensor) -> Tensor:
    h, out = m.up(x), torch.zeros_like(x)
    rows = keep.any(1).nonzero().squeeze(1)
    out.index_add_(0, rows, m.up(h[rows]))
    out[keep] = m.norm(h[keep])
    i, j = torch.where(labels > 1)
    out[i, j] = F.gelu(out[i, j])
    places = torch.nonzero(keep)
    return out.index_put((places[:, 0], places[:, 1]), m.up(x[keep]), accumulate=True)


def experts(m: Model, x: Tensor, keep: Tensor, labels: Tensor) -> Tensor:
    """As litgpt's Mixtral has them."""
    tokens = x.view(-1, 6)
    weights, choice = torch.topk(m.gate(tokens), 2)
    masks = (choice.unsqueeze(-1) == torch.arange(3)).permute(2, 0, 1)
    out = torch.zeros_like(tokens)
    for mask, expert in zip(masks, m.experts, strict=True):
        token, slot = torch.where(mask)
        out[token] += weights[token, slot, None] * expert(tokens[token])
    for e in range(3):
        token, slot = torch.where(choice == e)
        out = out.index_add(0, token, m.experts[e](tokens.index_select(0, token)) * weights[token, slot].unsqueeze(-1))
    return out


def sizes(m: Model, x: Tensor, keep: Tensor, labels: Tensor) -> Tensor:
    h = m.up(x)[keep]
    more = h.new_zeros(h.shape[0], 6) + h
    doubled = more * 2
    more += 1
    more.mul_(doubled)
    left, right = more.chunk(2, dim=-1)
    table = torch.arange(10.0, dtype=x.dtype).view(5, 2)
    cubes = h.pow(2).view(h.shape[0], 2, 3).sum((0, 2)).prod()
    return (torch.cat([right, left * 2], -1).sum() + table[labels[keep]].sum() + cubes) / len(h)


def recomputed(m: Model, x: Tensor, keep: Tensor, labels: Tensor) -> Tensor:
    """The mask is another when it selects again."""
    mask = keep.clone()
    first = x[mask].sum()
    mask[:, 0] = True
    return m.up(x).sum() * (first + 3 * x[mask].sum() + x[mask].abs().mean())


def numbers(m: Model, x: Tensor, keep: Tensor, labels: Tensor) -> Tensor:
    """A number that a tensor holds is as good as the tensor."""
    h, low = m.up(x), labels.flatten().tolist()[0]
    return h * x.abs().max().item() + low / (1 + int(keep.sum())) - float(labels.max()) * h.sum() + (h.sum() * max(low, 2))


def loops(m: Model, x: Tensor, keep: Tensor, labels: Tensor) -> Tensor:
    """A graph with self-loops, as PyTorch Geometric's layers add them: degrees, a softmax over the edges of a node, messages."""
    h, weights = m.up(x).flatten(0, 1), x[..., 0].flatten().abs()
    edges = torch.stack([labels.flatten(), torch.where(keep, labels, 4 - labels).flatten()])
    other = edges[0] != edges[1]
    own = torch.ones(12, dtype=x.dtype)
    own[edges[0][~other]] = weights[~other]
    edges = torch.cat([edges[:, other], torch.arange(12).view(1, -1).repeat(2, 1)], dim=1)
    weights, (row, column) = torch.cat([weights[other], own]), (edges[0], edges[1])
    degree = x.new_zeros((12,)).scatter_add_(0, row, torch.ones(edges.size(1), dtype=x.dtype))
    score = F.leaky_relu((h * m.scale).sum(-1)[row] + h[column].mean(-1))
    most = score.new_zeros((12,)).scatter_reduce_(0, column, score.detach(), reduce="amax", include_self=False)
    share = (score - most.index_select(0, column)).exp()
    share = share / (share.new_zeros((12,)).scatter_add_(0, column, share) + 1e-16)[column]
    message = (share * weights).unsqueeze(-1) * h[row]
    out = message.new_zeros((12, 6)).scatter_add_(0, column.view(-1, 1).expand_as(message), message)
    return (out.index_add(0, row, message) / degree[:, None]).scatter_reduce(0, row.view(-1, 1).expand_as(message), message, "mean")


def padded(m: Model, x: Tensor, keep: Tensor, labels: Tensor) -> Tensor:
    """Masks of rows of different lengths, written in a loop; a length is negative, or longer than the row, as slices may be."""
    lengths, mask, h = keep.sum(1), torch.zeros(4, 3, dtype=torch.bool), m.up(x)
    for i in range(4):
        mask[i, : lengths[i]] = True
        h[i, labels[i, 0] :, 1] = 2
        h[: lengths[i] - 2, i % 3] = -1.5
    return h * mask.unsqueeze(-1)


FORMS = [numbers, losses, regressions, sums, back, experts, sizes, recomputed, loops, padded]


def inputs(which: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(4, 3, 6), "keep": KEPT[which].clone(), "labels": torch.randint(0, 5, (4, 3))}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("form", FORMS)
def test_a_program_is_one_device(form: Callable[..., Tensor], mesh: str) -> None:
    given = inputs("one rank's" if mesh == "dp=2" else "some")
    module_means_itself(Model(form), given, mesh)


@pytest.mark.parametrize("form", [losses, sums, back, loops])
def test_of_nothing_it_is_what_torch_says(form: Callable[..., Tensor]) -> None:
    module_means_itself(Model(form), inputs("none"), "dp=2,tp=2")


def test_what_other_rows_hold_reaches_nothing() -> None:
    """Neither a result nor a gradient: not a number and infinity, in the rows and in what is computed of zeros in their place."""

    def form(m: Model, x: Tensor, keep: Tensor, labels: Tensor) -> Tensor:
        h = x.log()[keep]
        return (m.up(h / h.abs()) * m.scale).square().mean() + (m.up(x[keep]) / x[keep]).sum()

    given = inputs("one rank's")
    given["x"] = torch.where(given["keep"][..., None], given["x"].abs(), torch.tensor([math.nan, math.inf, 0.0, -1.0, 0.0, -math.inf]))
    program = module_means_itself(Model(form), given, "dp=2,tp=2")
    model = Model(form)
    model(**given).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert meshc.verify(program, dtype=torch.float64).worst < 1e-9


class Queue(nn.Module):
    """As MoCo has it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 4)
        self.register_buffer("keys", torch.randn(4, 16))
        self.register_buffer("times", torch.zeros(16, dtype=torch.int64))
        self.register_buffer("at", torch.tensor([8]))

    def forward(self, x: Tensor) -> Tensor:
        h = F.normalize(self.up(x), dim=1)
        out = h @ self.keys.clone()
        with torch.no_grad():
            at = int(self.at)
            self.keys[:, at : at + len(x)] = h.T
            self.times[at : at + len(x)] += 1
            self.times[at] = 5
            self.at[0] = (at + len(x)) % self.keys.shape[1]
        return out + self.times[at : at + 2].sum()


@pytest.mark.parametrize("mesh", MESHES)
def test_a_queue_is_written_where_its_pointer_says(mesh: str) -> None:
    torch.manual_seed(0)
    step_means_itself(Queue(), {"x": torch.randn(4, 6)}, mesh)


def returned(m: Model, x: Tensor, keep: Tensor, labels: Tensor) -> Tensor:
    return m.up(x)[keep]


def mixed(m: Model, x: Tensor, keep: Tensor, labels: Tensor) -> Tensor:
    h = m.up(x)[keep]
    return torch.softmax(h, dim=0).sum()


def drawn(m: Model, x: Tensor, keep: Tensor, labels: Tensor) -> Tensor:
    return F.dropout(m.up(x)[keep]).sum()


def paired(m: Model, x: Tensor, keep: Tensor, labels: Tensor) -> Tensor:
    h = m.up(x)[keep]
    return (h @ h.T).sum()


def viewed(m: Model, x: Tensor, keep: Tensor, labels: Tensor) -> Tensor:
    h = m.up(x)[keep]
    h[:, 0].add_(1)
    return h.sum()


def fixed(m: Model, x: Tensor, keep: Tensor, labels: Tensor) -> Tensor:
    """As many rows are selected as `x` has."""
    return (m.up(x)[keep] + x[:, 0]).sum()


def test_a_view_that_is_read_after_a_write_is_refused() -> None:
    class Later(Queue):
        def forward(self, x: Tensor) -> Tensor:
            at = int(self.at)
            seen = self.keys[:, at : at + 2]
            self.keys.mul_(2)
            return self.up(x) * seen.sum()

    with pytest.raises(CaptureError, match=r"(?s)int\(self.at\).*a view of what a number says is read after its tensor has changed"):
        meshc.compile(Later(), meshc.Mesh("dp=2"), kwargs={"x": torch.randn(4, 6)})


@pytest.mark.parametrize(("form", "why"), [
    (returned, "the model returns them"),
    (mixed, r"at \S+ `return torch.softmax\(h, dim=0\).sum\(\)` softmax\(\) is not known to treat each row by itself"),
    (drawn, r"dropout\(\) draws for each row that is selected"),
    (paired, r"at \S+ `return \(h @ h.T\).sum\(\)`"),
    (fixed, r"add\(\) is not known to treat each row by itself"),
    (viewed, r"at \S+ `h\[:, 0\].add_\(1\)` they are changed in place"),
])  # fmt: skip
def test_what_mixes_rows_is_refused_with_both_lines(form: Callable[..., Tensor], why: str) -> None:
    with pytest.raises(CaptureError, match=rf"(?s)m\.up\(x\)\[keep\].*{why}.*what to do: "):
        meshc.compile(Model(form), meshc.Mesh("dp=2"), kwargs=inputs("some"))
