"""What a compilation is spared, and that everything is as before when it is over."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import funcname_cache, graph_region_tracker, symbolic_convert
from torch._dynamo.guards import CheckFunctionManager

import meshc
from meshc.frontend.skipped_work import FRAME_WORDS, OBJECTS, call_in_large_frame, fewer_collections, without_lookups


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_no_guard_is_made_for_a_trace_that_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were a fifth of a compilation."""
    made: list[object] = []
    init = CheckFunctionManager.__init__

    def counted(self: CheckFunctionManager, *args: object, **kwargs: object) -> None:
        made.append(self)
        init(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(CheckFunctionManager, "__init__", counted)
    meshc.compile(nn.Linear(4, 8), meshc.Mesh("dp=2"), args=(torch.ones(2, 4),))
    assert not made
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
    assert len(made) == 1, "where torch makes guards has moved: see meshc/frontend/skipped_work.py"


@pytest.mark.usefixtures("thresholds")
@pytest.mark.parametrize("young, inside", [(700, OBJECTS), (0, 0), (3 * OBJECTS, 3 * OBJECTS)])
def test_garbage_is_looked_for_more_rarely(young: int, inside: int) -> None:
    gc.set_threshold(young, 7, 8)
    with pytest.raises(ZeroDivisionError), fewer_collections():
        assert gc.get_threshold() == (inside, 7, 8)
        raise ZeroDivisionError
    assert gc.get_threshold() == (young, 7, 8)


def test_calls_across_a_chunk_of_frames_map_no_memory() -> None:
    """Somewhere on the way down each call of a loop maps a chunk; within one large frame none does."""

    def deep(depth: int) -> int:
        return 0 if depth == 0 else deep(depth - 1)

    def faults(depth: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(200):
            deep(1)
        found = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        return found if depth == 0 else max(found, faults(depth - 1))

    assert call_in_large_frame(lambda _: sys._getframe(1).f_code.co_stacksize, None) == FRAME_WORDS
    assert call_in_large_frame(faults, 150) < 200
    with pytest.raises(ZeroDivisionError):
        call_in_large_frame(lambda zero: 1 // zero, 0)


def test_what_nobody_asks_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which function a line is, for logs: whole files were taken apart for that, a tenth of a first compilation."""
    read: list[str] = []
    monkeypatch.setattr(funcname_cache, "cache", {})
    monkeypatch.setattr(funcname_cache, "_add_file", lambda name: (read.append(name), funcname_cache.cache.setdefault(name, {})))
    before = symbolic_convert.get_funcname, torch._dynamo.lookup_backend, graph_region_tracker.InputPickler
    meshc.compile(nn.Linear(4, 8), meshc.Mesh("dp=2"), args=(torch.ones(2, 4),))
    assert not read
    assert before == (symbolic_convert.get_funcname, torch._dynamo.lookup_backend, graph_region_tracker.InputPickler)
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(3))
    assert read, "where torch names functions has moved: see meshc/frontend/skipped_work.py"


def test_what_is_asked_all_the_same_is_answered() -> None:
    with without_lookups():
        assert graph_region_tracker.InputPickler().dumps((1, "a"))


def test_no_code_is_written_for_graphs_that_nobody_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[object] = []
    python_code = torch.fx.Graph.python_code

    def counted(self: torch.fx.Graph, *args: Any, **named: Any) -> object:
        written.append(self)
        return python_code(self, *args, **named)

    monkeypatch.setattr(torch.fx.Graph, "python_code", counted)
    meshc.compile(nn.Linear(4, 8), meshc.Mesh("dp=2"), args=(torch.ones(2, 4),))
    assert len(written) <= 4  # Dynamo's, of its own graph; twelve are written otherwise
