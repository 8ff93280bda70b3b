"""Table of the formats of few bits: element types, what one scale covers, how it is made, and which products stay as they are; formats in
which gradients travel.

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
ROLES: Final[tuple[Role, ...]] = ("weight", "activation", "gradient")


@dataclass(frozen=True)
class Element:
    """A type of elements.

    dtype    in which they are stored
    largest  the largest of them, to which values beyond are clamped; 0: values are not scaled
    """

    dtype: torch.dtype
    largest: float


ELEMENTS: Final[Mapping[str, Element]] = {
    "e4m3": Element(torch.float8_e4m3fn, 448.0),
    "e5m2": Element(torch.float8_e5m2, 57344.0),
    "int8": Element(torch.int8, 127.0),
    "e2m1": Element(torch.float8_e4m3fn, 6.0),
    "bf16": Element(torch.bfloat16, 0.0),
}
"""Of e2m1, which torch has packed in pairs only, the values (0, 0.5, 1, 1.5, 2, 3, 4, 6) are stored as e4m3, which has them all.
(Sources: OCP 8-bit Floating Point Specification, revision 1.0; OCP Microscaling Formats, version 1.0, section 5.)"""

Rounded = Literal["", "down", "ocp"]
"""Scales are float32 as they come (""), or rounded to a power of two: down, so that nothing is clamped by it, or ("ocp") such that the
largest magnitude has the largest exponent, by which up to a quarter of it may be clamped (OCP Microscaling Formats, section 6.3)."""


@dataclass(frozen=True)
class Format:
    """A format of products.

    name      as a plan says it
    element   of weights and activations
    gradient  element of gradients
    along     elements under one scale along the dim that is summed over
    across    elements under one scale along the other dim, by role: 1, WHOLE, or a number
    rounded   how scales are rounded
    two       scales of blocks are e4m3 in units of one scale of the whole tensor
    high      products that are computed as the model has them: "weight gradient"
    by_row    the gradient of a weight is made of the rows that forward has rounded, and of gradients as they are: of experts, whose rows
              have scales of their own
    random    gradients are rounded up or down by a draw, with the probability of the distance from the other neighbour
    history   number of steps before, of whose largest magnitudes scales are made; 0: of what is rounded itself
    """

    name: str
    element: str
    gradient: str
    along: int
    across: Mapping[Role, int]
    rounded: Rounded = ""
    two: bool = False
    high: frozenset[str] = frozenset()
    by_row: bool = False
    history: int = 0
    random: bool = False

    @property
    def is_scaled(self) -> bool:
        return ELEMENTS[self.element].largest > 0

    @property
    def spans_batch(self) -> bool:
        """Whether a scale is made of elements of several rows of the batch, and so of several microbatches."""
        whole = self.along == WHOLE and not self.by_row and WEIGHT_GRADIENT not in self.high
        return self.is_scaled and not self.history and (self.two or whole)


_EACH: Final[Mapping[Role, int]] = dict.fromkeys(ROLES, 1)
_ALL: Final[Mapping[Role, int]] = dict.fromkeys(ROLES, WHOLE)
WEIGHT_GRADIENT: Final = "weight gradient"

_TABLE: Final = (
    Format("float8 tensor", "e4m3", "e5m2", WHOLE, _ALL),
    Format("float8 tensor, delayed", "e4m3", "e5m2", WHOLE, _ALL, history=16),
    Format("float8 row", "e4m3", "e4m3", WHOLE, _EACH, rounded="down"),
    Format("float8 row, gradients in bf16", "e4m3", "e4m3", WHOLE, _EACH, rounded="down", high=frozenset({WEIGHT_GRADIENT})),
    Format("float8 row, stochastic gradients", "e4m3", "e4m3", WHOLE, _EACH, rounded="down", random=True),
    Format("float8 block", "e4m3", "e4m3", 128, {**_EACH, "weight": 128}),
    Format("float8 mx", "e4m3", "e4m3", 32, _EACH, rounded="ocp"),
    Format("nvfp4", "e2m1", "e2m1", 16, _EACH, two=True),
    Format("nvfp4, stochastic gradients", "e2m1", "e2m1", 16, _EACH, two=True, random=True),
    Format("int8 row", "int8", "int8", WHOLE, _EACH),
    Format("bf16", "bf16", "bf16", WHOLE, _ALL),
)
FORMATS: Final[Mapping[str, Format]] = {each.name: each for each in _TABLE}
"""Name in a plan -> format. (Sources: tensor and row are torchao's recipes `tensorwise` and `rowwise`, torchao/float8/config.py at 0.18,
also in what is rounded when, and in that scales of rows are powers of two; delayed is Transformer Engine's `DelayedScaling` in its hybrid
format, transformer_engine/common/recipe, with a history of 16 steps, as torchao's delayed scales had, where theirs has 1024; block is
DeepSeek-V3's, arXiv 2412.19437, section 3.3; mx is MXFP8 of OCP Microscaling Formats, version 1.0; nvfp4 as in
torchao/prototype/mx_formats/nvfp4_tensor.py, with stochastic gradients as in arXiv 2509.25149.)"""


def draw_name(parameter: str, sums_features: bool) -> str:
    """The name of the draws by which a gradient is rounded, for the gradient of what goes in, or that of the weight."""
    return f"{parameter}/meshc.gradient" if sums_features else f"{parameter}/meshc.weight_gradient"


SIGN: Final = "sign"
COMPRESSED: Final[Mapping[str, str]] = {"int8": "int8", "fp8": "e4m3", SIGN: ""}
"""Name in a compress line -> element type of a gradient on its way, under a scale for each block of 256 of a row; of a sign a bit, under
one scale for each part and parameter. `docs/compressed-gradients.md` defines them."""
