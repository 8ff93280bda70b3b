"""Listed types with routed experts whose code is unlike that of the families in `experts.py`, shrunk, on ranks that have their experts."""

from __future__ import annotations

import re
from typing import Final

import pytest

from tests.broad import broad
from tests.captured import Captured
from tests.zoo.listed import case, listed
from tests.zoo.run import adamw

TYPES: Final = {
    "afmoe": "scores that a bias changes, and first layers without experts",
    "aria_text": "matrices [experts, in, out]",
    "llama4_text": "every expert on all tokens",
    "longcat_flash": "experts without weights",
    "nemotron_h": "experts without a gate, beside Mamba",
}
"""By type, what is its own."""


@pytest.mark.parametrize("kind", [broad(kind) for kind in TYPES])
def test_a_step_equals_one_device(kind: str) -> None:
    """Loss, every gradient, two steps of AdamW; of each layer's last product a rank has its own experts' weights."""
    one = next(one for one in listed() if one.key == f"causal {kind}")
    found = Captured(case(one), train=True, double=True, mesh="ep=2")
    found.verify_training("ep=2", None, adamw)
    stacks = [port for port in found.latest.inputs if re.fullmatch(r"parameter:.*\.experts\.down_proj", port.key)]
    assert stacks
    for port in stacks:
        assert port.sharding is not None and [part.axes for part in port.sharding.dims[0]] == [("ep",)], port.key
