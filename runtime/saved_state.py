"""Saved states, read without a mesh: `meshc.runtime.saved.state_folder`, under the name that users import."""

from meshc.runtime.saved.state_folder import (
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
