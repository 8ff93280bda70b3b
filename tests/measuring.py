"""A plugin that writes the seconds of each test into the folder $MEASURED: of a processor, or of the clock where ranks compute for it."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def _taken(item: pytest.Item) -> float:
    """Ranks are children of other processes, so that theirs are nobody's seconds; a test that starts some waits for them."""
    if item.get_closest_marker("processes"):
        return time.monotonic()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = _taken(item)
    yield
    with (Path(os.environ["MEASURED"]) / str(os.getpid())).open("a") as file:
        file.write(json.dumps([item.nodeid, _taken(item) - before]) + "\n")
