"""One device that draws as meshc's ranks do: `meshc.frontend.reference`, under the name that users import."""

from meshc.frontend.reference import (
    ANSWERS,
    FILLING,
    Answer,
    Microbatch,
    ReferenceRandom,
    Tile,
    aten,
)

__all__ = [
    "ANSWERS",
    "Answer",
    "FILLING",
    "Microbatch",
    "ReferenceRandom",
    "Tile",
    "aten",
]
