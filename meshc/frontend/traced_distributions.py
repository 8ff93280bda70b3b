"""`torch.distributions` in a model that is traced: what it decides by values, and what it looks up in a way that no trace can follow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from torch.distributions import Distribution, kl


@contextlib.contextmanager
def traced_distributions() -> Iterator[None]:
    """Inside, a distribution checks neither its arguments nor what it is asked about, as under torch.compile (an explicit
    `validate_args=True` does); and `kl_divergence` finds the function of two classes in a table, where it would search for it."""
    checked = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        with mock.patch.dict(kl._KL_MEMOIZE, kl._KL_REGISTRY):
            yield
    finally:
        Distribution.set_default_validate_args(checked)
