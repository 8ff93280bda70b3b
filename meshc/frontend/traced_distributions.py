"""`torch.distributions` in a traced model: without validation by values, and with a table of divergences that a trace can follow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.distributions import Distribution, kl

from meshc.replacements import replace_targets


@contextlib.contextmanager
def traced_distributions() -> Iterator[None]:
    """A context in which a distribution validates neither its arguments nor its samples, as under torch.compile (an explicit
    `validate_args=True` does); and `kl_divergence` finds the function of two classes in a table, instead of a search."""
    checked = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        with replace_targets(divergences=kl._KL_REGISTRY):
            yield
    finally:
        Distribution.set_default_validate_args(checked)
