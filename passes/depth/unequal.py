"""Unequal: what tells two layers apart, or a model from its part."""

from __future__ import annotations

from meshc.errors import MeshcError


class Unequal(MeshcError):
    """The first difference that was found. No user sees it raised: the model is captured whole, with a note."""
