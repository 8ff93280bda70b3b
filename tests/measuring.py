"""A plugin that writes the processor seconds of each test, and of the processes it has waited for, into the folder $MEASURED."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def _taken() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = _taken()
    yield
    with (Path(os.environ["MEASURED"]) / str(os.getpid())).open("a") as file:
        file.write(json.dumps([item.nodeid, _taken() - before]) + "\n")
