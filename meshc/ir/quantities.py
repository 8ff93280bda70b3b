"""Parser of memory sizes with units: `80GB`, `40 GiB`, `512 MB`; decimal units, or binary ones with an i."""

from __future__ import annotations

import re
from typing import Final

from meshc.errors import PlanError

UNITS: Final = {"B": 1, **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", 1)},
                **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", 1)}}  # fmt: skip
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def read_bytes(text: str, what: str) -> int:
    """The bytes of a size such as `80GB`; a number without a unit is bytes. Raises PlanError, which begins with `what`."""
    found = _SIZE.fullmatch(text)
    unit = None if found is None else {name.lower(): size for name, size in UNITS.items()}.get(found[2].lower() or "b")
    if found is None or unit is None or len(found[1]) > 20:
        raise PlanError(f"{what}: {text!r} is no size of memory; write it as 80GB, 40 GiB or a number of bytes")
    return int(float(found[1]) * unit) if "." in found[1] else int(found[1]) * unit
