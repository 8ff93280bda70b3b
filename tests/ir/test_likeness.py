"""A record copied with other fields is what `dataclasses.replace` makes."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from meshc.ir import Record, Source
from meshc.ir.likeness import like
from meshc.ir.sharding import Part, Sharding


def test_a_copy_is_what_replace_makes() -> None:
    sharding = Sharding(((Part("batch", 8, ("dp",)),),), (("tp", "sum"),))
    one = Record((8,), torch.float32, sharding, Source("m.py", 3, "x + 1", "up"), "why", "backward", "mm")
    others = {"shape": (4,), "sharding": replace(sharding, partial=())}
    made = like(one, **others)
    assert made == replace(one, **others) and hash(made) == hash(replace(one, **others)) and type(made) is Record
    assert one.shape == (8,) and made.source is one.source
    with pytest.raises(FrozenInstanceError):
        made.shape = ()  # type: ignore[misc]
