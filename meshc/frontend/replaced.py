"""What stands for something else while a graph is captured, in one context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from meshc.frontend.flex import traced_flex
from meshc.frontend.known_outcomes import known_outcomes
from meshc.frontend.side_effects import Seen, observed
from meshc.frontend.spared import unguarded
from meshc.frontend.stock_experts import unsorted_experts
from meshc.frontend.stock_scans import traced_scans
from meshc.frontend.traced_adaptive import traced_adaptive
from meshc.frontend.traced_ctc import traced_ctc


@contextlib.contextmanager
def replaced(opened: bool) -> Iterator[Seen]:
    """Inside, what no graph could follow is something else, and what Python does beside is seen. `opened`: sizes stay open, by guards."""
    with contextlib.nullcontext() if opened else unguarded(), unsorted_experts(), traced_scans(), traced_flex(), traced_ctc():
        with traced_adaptive(), known_outcomes(), observed() as seen:
            yield seen
