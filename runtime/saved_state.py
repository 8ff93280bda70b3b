"""Saved states, read without a mesh: `meshc.runtime.saved.checkpoint_folder`, under the name that users import."""

from meshc.runtime.saved.checkpoint_folder import SavedState, load_model

__all__ = ["SavedState", "load_model"]
