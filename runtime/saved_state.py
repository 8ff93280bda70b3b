"""Saved states, read without a mesh: `meshc.runtime.saved.saved_state`, under the name that users import."""

from meshc.runtime.saved.saved_state import (
    ADVICE,
    FORMAT,
    READ,
    TABLE,
    VERSION,
    Meet,
    SavedState,
    check_target,
    load_model,
    save_state,
)

__all__ = [
    "ADVICE",
    "FORMAT",
    "Meet",
    "READ",
    "SavedState",
    "TABLE",
    "VERSION",
    "check_target",
    "load_model",
    "save_state",
]
