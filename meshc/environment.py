"""Environment variables, read here and nowhere else.

    MESHC_DUMP=dir    write the program's text after each pass into dir, numbered
    MESHC_VERIFY=1    simulate the program after each pass, and name the pass that broke it
    MESHC_LOG=info    print what each pass took and noted
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Hook = Callable[[str, Any], None]


def hook(program: Any, simulation: Any) -> Hook | None:
    """What the pass runner calls after each pass, as the environment asks."""
    wanted: list[Hook] = []
    if os.environ.get("MESHC_DUMP"):
        wanted.append(dumper(os.environ["MESHC_DUMP"]))
    if not wanted:
        return None

    def call(name: str, draft: Any) -> None:
        for one in wanted:
            one(name, draft)

    return call


def dumper(path: str | Path) -> Hook:
    """Writes `NN_pass.py` after each pass that leaves a graph."""
    raise NotImplementedError
