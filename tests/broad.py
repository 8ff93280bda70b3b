"""Marks cases that only `make test-broad` runs, whatever they take; `tests/broad.txt` lists others."""

from __future__ import annotations

from typing import Any

import pytest


def broad(*values: Any, id: str | None = None) -> Any:
    """The values of one case of a parametrized test that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.broad, id=id)
