"""Formats of products in which a program equals one device to the last digits of float64."""

from __future__ import annotations

from typing import Final

from meshc.ir.formats import FORMATS

SCALED: Final = [name for name, form in FORMATS.items() if form.is_scaled]
"""Their products are summed in float64 where the model computes in it; those of the others in fewer bits, in which ranks add."""
