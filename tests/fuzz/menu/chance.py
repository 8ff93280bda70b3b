"""Random numbers: the same draws on every mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fuzz.menu.entry import Entry

if TYPE_CHECKING:
    from tests.fuzz.draw import Drawer

TEXTS = (
    "F.dropout({0}, 0.3)", "F.dropout({0}, 0.5, training=True)", "F.dropout({0}, 0.25, training=False)", "F.alpha_dropout({0}, 0.3, True)",
    "{0} + torch.rand_like({0})", "{0} * torch.randn_like({0})", "{0} * torch.bernoulli(torch.full_like({0}, 0.4))",
    "torch.bernoulli({0}.detach().sigmoid()) + {0}", "{0} + torch.empty_like({0}).exponential_(2.0)", "F.rrelu({0}, training=True)",
    "{0} * torch.zeros_like({0}).uniform_(-1.0, 2.0)", "{0} + torch.empty_like({0}).normal_(1.0, 0.5)", "torch.normal({0}, 0.5) + {0}",
    "{0} * torch.empty_like({0}).geometric_(0.4)", "{0} + torch.empty_like({0}).log_normal_(0.0, 0.3)",
    "{0} * torch.randint_like({0}, 1, 4)",
    "F.gumbel_softmax({0}, dim=-1)", "F.gumbel_softmax({0}, hard=True) + {0}", "{0} * torch.empty_like({0}).bernoulli_(0.3)",
    "torch.normal({0}.detach(), {0}.detach().abs()) * {0}", "F.rrelu({0})", "F.dropout({0} * 2.0, 0.3, inplace=True)",
)  # fmt: skip


def _drawn(d: Drawer) -> tuple[str, list[str]]:
    return d.one(TEXTS), [d.floating(1, 4, filled=True)]


def _channels(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(4, 4, filled=True)
    return d.one(("F.dropout2d({0}, 0.4)", "F.dropout1d({0}[0], 0.4)", "F.feature_alpha_dropout({0}, 0.4, True)")), [x]


def _fresh(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 3, filled=True)
    shape = d.shape(x)
    text = d.one((f"{{0}} + torch.randn({shape}, dtype=torch.float64)", f"{{0}} * torch.rand({shape[-1:]}, dtype=torch.float64)",
                  f"{{0}}[..., torch.randperm({shape[-1]})]", f"{{0}}[torch.randint(0, {shape[0]}, (5,))]",
                  f"torch.multinomial({{0}}.detach().softmax(-1).reshape(-1, {shape[-1]}), {shape[-1]})",
                  f"torch.multinomial({{0}}.detach().softmax(-1).reshape(-1, {shape[-1]}), 6, replacement=True)"))  # fmt: skip
    return text, [x]


def _recurrent(d: Drawer) -> tuple[str, list[str]]:
    """Two layers with dropout between them; weights [4 * width, ...] for an LSTM, three times the width for a GRU."""
    x = d.floating(3, 3, filled=True)
    _, batch, width = d.shape(x)
    size = d.number(1, 4)
    kind, gates = d.one((("lstm", 4), ("gru", 3), ("rnn_tanh", 1)))
    weights = [d.like(shape) for inputs in (width, size) for shape in ([gates * size, inputs], [gates * size, size])]
    start = f"torch.zeros(2, {batch}, {size}, dtype=torch.float64)"
    start = f"({start}, {start})" if kind == "lstm" else start
    return f"torch.{kind}({{0}}, {start}, [{{1}}, {{2}}, {{3}}, {{4}}], False, 2, 0.3, True, False, False)[0]", [x, *weights]


def _attention(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(4, 4, filled=True)
    return "F.scaled_dot_product_attention({0}, {0}, {0}, dropout_p=0.2)", [x]


MENU: dict[str, Entry] = {
    "drawn": _drawn,
    "drawn for channels": _channels,
    "fresh draw": _fresh,
    "dropout in attention": _attention,
    "recurrent": _recurrent,
}
