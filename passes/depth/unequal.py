"""The error of two layers that differ, or of a model that differs from its part."""

from __future__ import annotations

from meshc.errors import MeshcError


class Unequal(MeshcError):
    """The first difference that was found. Users never see it raised: the model is captured whole, with a note."""
