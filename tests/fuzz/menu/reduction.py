"""Sums and other reductions, softmax, scans, sorting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fuzz.menu.entry import Entry

if TYPE_CHECKING:
    from tests.fuzz.draw import Drawer

ALL = ("{0}.sum()", "{0}.mean()", "{0}.amax()", "{0}.max()", "{0}.min()", "{0}.norm()", "{0}.var()", "{0}.std()",
       "torch.logsumexp({0}.flatten(), 0)",
       "(0.2 * {0}.tanh() + 1.0).prod()", "({0} > 0).sum()", "({0} > 1).any()", "({0} > -3).all()", "torch.count_nonzero({0} > 0)",
       "{0}.argmax()",
       "{0}.square().mean().sqrt()", "F.mse_loss({0}, {0}.detach() * 0.5)", "F.l1_loss({0}, {0}.detach() * 0.5)",
       "{0}.flatten().median()")  # fmt: skip
DIMS = ("{{0}}.sum({dims}, keepdim={keep})", "{{0}}.mean({dims}, keepdim={keep})", "{{0}}.amax({dims}, keepdim={keep})",
        "{{0}}.amin({dims}, keepdim={keep})", "{{0}}.var({dims}, keepdim={keep})", "{{0}}.std({dims}, unbiased=False, keepdim={keep})",
        "torch.logsumexp({{0}}, {dims}, keepdim={keep})", "torch.linalg.vector_norm({{0}}, dim={dims}, keepdim={keep})",
        "torch.var_mean({{0}}, {dims}, keepdim={keep})[0]", "torch.linalg.vector_norm({{0}}, 1, {dims}, {keep})",
        "torch.linalg.vector_norm({{0}}, float('inf'), {dims}, {keep})", "({{0}} > 0).sum({dims}, keepdim={keep})",
        "torch.std_mean({{0}}, {dims}, keepdim={keep})[1]", "torch.nansum({{0}}, {dims}, keepdim={keep})")  # fmt: skip
DIM = ("{{0}}.prod({dim}, keepdim={keep})", "{{0}}.argmax({dim}, keepdim={keep})", "{{0}}.argmin({dim}, keepdim={keep})",
       "{{0}}.max({dim}, keepdim={keep})[0]", "{{0}}.min({dim}, keepdim={keep}).values", "({{0}} > 1).any({dim}, keepdim={keep})",
       "({{0}} > -1).all({dim}, keepdim={keep})", "{{0}}.median({dim}, keepdim={keep})[0]", "{{0}}.max({dim}, keepdim={keep})[1]",
       "{{0}}.norm(dim={dim}, keepdim={keep})")  # fmt: skip
ALONG = ("torch.softmax({{0}}, {dim})", "torch.log_softmax({{0}}, {dim})", "F.softmin({{0}}, {dim})", "F.normalize({{0}}, dim={dim})",
         "{{0}}.cumsum({dim})", "(0.1 * {{0}} + 1.0).cumprod({dim})", "torch.cummax({{0}}, {dim})[0]", "torch.cummin({{0}}, {dim}).values",
         "torch.logcumsumexp({{0}}, {dim})", "torch.sort({{0}}, {dim})[0]", "{{0}}.argsort({dim})",
         "torch.sort({{0}}, {dim}, descending=True)[0]",
         "torch.sort({{0}}, dim={dim}, stable=True).indices", "({{0}} > 0).cumsum({dim})", "{{0}} - {{0}}.mean({dim}, keepdim=True)",
         "{{0}}.diff(dim={dim})", "{{0}} / ({{0}}.norm(dim={dim}, keepdim=True) + 0.1)",
         "torch.cumsum({{0}}, {dim}).flip({dim})")  # fmt: skip


def _all(d: Drawer) -> tuple[str, list[str]]:
    return d.one(ALL), [d.floating(1, 5, filled=True)]


def _dims(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 5)
    dims = d.some(len(d.shape(x)))
    return d.one(DIMS).format(dims=dims, keep=d.coin(0.4)), [x]


def _dim(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 5)
    return d.one(DIM).format(dim=d.dim(x), keep=d.coin(0.4)), [x]


def _along(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 5)
    return d.one(ALONG).format(dim=d.dim(x)), [x]


def _topk(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 4, filled=True)
    dim = d.dim(x)
    count = d.number(1, d.shape(x)[dim])
    if d.coin(0.3):
        return f"torch.kthvalue({{0}}, {count}, {dim})[0]", [x]
    return f"{{out0}}, {{out1}} = torch.topk({{0}}, {count}, {dim})", [x]


def _cross_entropy(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(2, 3, filled=True)
    batch, classes, *rest = d.shape(x)
    target = d.indices([batch, *rest], classes)
    reduction = d.one(("mean", "sum", "none"))
    options = d.one(("", ", label_smoothing=0.1", ", ignore_index=0"))
    if options.endswith("0") and reduction == "mean":
        reduction = "sum"
    return f"F.cross_entropy({{0}}, {{1}}, reduction='{reduction}'{options})", [x, target]


def _losses(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 4, filled=True)
    text = d.one(("F.mse_loss({0}, {1})", "F.l1_loss({0}, {1}, reduction='sum') * 0.1", "F.huber_loss({0}, {1})",
                  "F.smooth_l1_loss({0}, {1})",
                  "F.binary_cross_entropy_with_logits({0}, {1}.sigmoid())", "F.cosine_similarity({0}, {1}, dim=-1)",
                  "F.kl_div({0}.log_softmax(-1), {1}.softmax(-1), reduction='batchmean')", "F.pairwise_distance({0}, {1})",
                  "F.soft_margin_loss({0}, {1}.sign())", "F.poisson_nll_loss({0}.clamp(max=2.0), {1}.abs())"))  # fmt: skip
    return text, [x, d.like(d.shape(x))]


MENU: dict[str, Entry] = {
    "reduction of all": _all,
    "reduction": _dims,
    "reduction of more": _dims,
    "reduction of a dim": _dim,
    "along a dim": _along,
    "along another dim": _along,
    "topk": _topk,
    "cross-entropy": _cross_entropy,
    "losses": _losses,
}
