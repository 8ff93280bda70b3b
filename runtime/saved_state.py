"""Saved states, read without a mesh: `meshc.runtime.saved.state_folder`, under the name that users import."""

from meshc.runtime.saved.state_folder import SavedState, load_model

__all__ = ["SavedState", "load_model"]
