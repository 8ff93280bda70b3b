"""What a rank is told that compiles for a call which another rank does not make."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshc.api.compilations import Compilations
from meshc.errors import InputError, MeshcError, StateError
from meshc.runtime.agreement import agreed
from meshc.runtime.agreement.compare import Disagreement


@pytest.mark.parametrize(
    "known, kind, text",
    [
        ({}, StateError, "this rank calls GPT, which nobody has called yet, and rank 1 does something else\n  what to do: call it on every"),
        ({1: "x [4, 8]"}, InputError, "this rank passed x .3, 8.; rank 1 passed what the program takes, x .4, 8."),
    ],
)
def test_a_first_call_is_told_from_another_size(known: dict[int, str], kind: type[MeshcError], text: str) -> None:
    asked = SimpleNamespace(name="GPT", inputs="global")
    compilations = cast(Any, SimpleNamespace(_known=known, asked=asked))
    refused = Compilations._refusal(compilations, Disagreement(agreed.INPUTS, "x [3, 8]", 1, "", alone=True))
    assert type(refused) is kind
    with pytest.raises(kind, match=text):
        raise refused
