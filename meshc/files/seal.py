"""JSON tables with a hash of their own text, by which damage or an edit is detected.

The hash guards against accidents; whoever edits a table on purpose can seal it again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Final

_SEAL: Final = re.compile(r'"sha256": "([0-9a-f]{64})"\n}\n?\Z')


def seal_text(table: Mapping[str, object]) -> str:
    """The table's text, whose last entry is the hash of the text before it."""
    rows = {name: value for name, value in table.items() if name != "sha256"}
    text = json.dumps({**rows, "sha256": "0" * 64}, indent=1) + "\n"
    found = _SEAL.search(text)
    assert found is not None
    return f'{text[: found.start(1)]}{_hash(text[: found.start(1)])}{text[found.end(1) :]}'


def has_valid_seal(text: str) -> bool:
    found = _SEAL.search(text)
    return found is not None and found[1] == _hash(text[: found.start(1)])


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
