"""Table of the formats of few bits: element types, what one scale covers, how it is made, and which products stay as they are.

A product of [m, k] and [k, n] in a format is a product of two operands that are multiplied by a scale, rounded to an element type, and
multiplied by the inverse of the scale. `docs/precision.md` defines it. Adding a format is adding an entry to FORMATS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch

WHOLE: Final = 0
"""In the place of a number of elements under one scale: all along the dim."""

Role = Literal["weight", "activation", "gradient"]
"""What an operand of a product is: a weight, a value of forward, or a gradient of such a value."""


@dataclass(frozen=True)
class Element:
    """A type of elements.

    dtype    in which they are stored
    largest  the largest of them, to which values beyond are clamped
    step     a relative step, of which a rounding to nearest is off by half at most; of integers, of the largest
    """

    dtype: torch.dtype
    largest: float
    step: float


ELEMENTS: Final[Mapping[str, Element]] = {
    "e4m3": Element(torch.float8_e4m3fn, 448.0, 2.0**-3),
    "e5m2": Element(torch.float8_e5m2, 57344.0, 2.0**-2),
    "int8": Element(torch.int8, 127.0, 1 / 127),
    "e2m1": Element(torch.float8_e4m3fn, 6.0, 2.0**-1),
}
"""Of e2m1, which torch has packed in pairs only, the values (0, 0.5, 1, 1.5, 2, 3, 4, 6) are stored as e4m3, which has them all.
(Sources: OCP 8-bit Floating Point Specification, revision 1.0; OCP Microscaling Formats, version 1.0, section 5.)"""

Rounded = Literal["", "down", "ocp"]
"""Scales are float32 as they come (""), or rounded to a power of two: down, so that nothing is clamped by it, or ("ocp") such that the
largest magnitude has the largest exponent, by which up to a quarter of it may be clamped (OCP Microscaling Formats, section 6.3)."""


@dataclass(frozen=True)
class Format:
    """A format of products.

    element   of weights and activations
    gradient  element of gradients
    along     elements under one scale along the dim that is summed over
    across    elements under one scale along the other dim, by role: 1, WHOLE, or a number
    rounded   how scales are rounded
    two       scales of blocks are e4m3 in units of one scale of the whole tensor
    high      products that are computed as the model has them: "weight gradient"
    """

    element: str
    gradient: str
    along: int
    across: Mapping[Role, int]
    rounded: Rounded = ""
    two: bool = False
    high: frozenset[str] = frozenset()


_EACH: Final[Mapping[Role, int]] = {"weight": 1, "activation": 1, "gradient": 1}
_ALL: Final[Mapping[Role, int]] = dict.fromkeys(_EACH, WHOLE)
WEIGHT_GRADIENT: Final = "weight gradient"

FORMATS: Final[Mapping[str, Format]] = {
    "float8 tensor": Format("e4m3", "e5m2", WHOLE, _ALL),
    "float8 row": Format("e4m3", "e4m3", WHOLE, _EACH, rounded="down"),
    "float8 row, gradients in bf16": Format("e4m3", "e4m3", WHOLE, _EACH, rounded="down", high=frozenset({WEIGHT_GRADIENT})),
    "float8 block": Format("e4m3", "e4m3", 128, {**_EACH, "weight": 128}),
    "float8 mx": Format("e4m3", "e4m3", 32, _EACH, rounded="ocp"),
    "nvfp4": Format("e2m1", "e2m1", 16, _EACH, two=True),
    "int8 row": Format("int8", "int8", WHOLE, _EACH),
}
"""Name in a plan -> format. (Sources: tensor and row are torchao's recipes `tensorwise` and `rowwise`, torchao/float8/config.py at 0.18,
also in what is rounded when, and in that scales of rows are powers of two; block is DeepSeek-V3's, arXiv 2412.19437, section 3.3; mx is
MXFP8 of OCP Microscaling Formats, version 1.0; nvfp4 as in torchao/prototype/mx_formats/nvfp4_tensor.py.)"""

BF16: Final = "bf16"
"""Not in the table: operands are rounded to bfloat16, and have no scale."""
