"""Random numbers: the same draws on every mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshc.testing.menu.entry import Entry

if TYPE_CHECKING:
    from meshc.testing.draw import Drawer

TEXTS = (
    "F.dropout({0}, 0.3)", "F.dropout({0}, 0.5, training=True)", "F.dropout({0}, 0.25, training=False)", "F.alpha_dropout({0}, 0.3, True)",
    "{0} + torch.rand_like({0})", "{0} * torch.randn_like({0})", "{0} * torch.bernoulli(torch.full_like({0}, 0.4))",
    "torch.bernoulli({0}.detach().sigmoid()) + {0}",
)  # fmt: skip


def _drawn(d: Drawer) -> tuple[str, list[str]]:
    return d.one(TEXTS), [d.floating(1, 4, filled=True)]


def _channels(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(4, 4, filled=True)
    return d.one(("F.dropout2d({0}, 0.4)", "F.dropout1d({0}[0], 0.4)")), [x]


def _fresh(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 3, filled=True)
    shape = d.shape(x)
    return d.one((f"{{0}} + torch.randn({shape}, dtype=torch.float64)", f"{{0}} * torch.rand({shape[-1:]}, dtype=torch.float64)")), [x]


def _attention(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(4, 4, filled=True)
    return "F.scaled_dot_product_attention({0}, {0}, {0}, dropout_p=0.2)", [x]


MENU: dict[str, Entry] = {
    "drawn": _drawn,
    "drawn for channels": _channels,
    "fresh draw": _fresh,
    "dropout in attention": _attention,
}
