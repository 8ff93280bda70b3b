"""One compilation for all ranks: rank 0 compiles, and the others load its program if they would have compiled the same.

    rank 0   compiles ....... the program, and what its trace has read of Python ──> all                      hash
    rank 1   waits ........................... finds the same in the same places, and reads the program       hash
    rank 2   waits ........................... norm.eps differs: warns, compiles for itself ...........       hash

Before, all have agreed on inputs, model, plan, options, optimizer (`meshc.api.job_key`); behind it they compare the
hashes of what they have, as ever. So ranks that differ in what their model's code reads are refused, where that makes another program,
with the place and both values; what no code reads may differ (`docs/decisions/one-program-for-all-ranks.md`).
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from meshc import environment
from meshc.api import cache_entry, compilation_result, job_key, progress
from meshc.api.compilation_result import CompilationResult
from meshc.api.compile_arguments import CompileArguments
from meshc.api.value_keys import changes_text
from meshc.errors import ArtifactError, CaptureError
from meshc.frontend.dependencies import Dependencies
from meshc.frontend.libraries import stock_models
from meshc.frontend.output_tree_data import NotPlainData
from meshc.frontend.skipped_work import fewer_collections
from meshc.lazy_module import LazyModule
from meshc.passes.phases.compiler_pass import Hook
from meshc.passes.phases.request import Request
from meshc.program.program import PlainProgram
from meshc.runtime.agreement import compare
from meshc.runtime.failure.failed_rank import FailureBoard, check_after_passes

if TYPE_CHECKING:
    from meshc.passes.driver import compile_program as driver
    from meshc.passes.driver import hooks
    from meshc.passes.driver.shared_trace import SharedTraceCompiler
    from meshc.runtime.simulator import passcheck
else:  # who takes a program, from rank 0 or from disk, needs no passes
    driver, hooks = LazyModule("meshc.passes.driver.compile_program"), LazyModule("meshc.passes.driver.hooks")
    passcheck = LazyModule("meshc.runtime.simulator.passcheck")

_FRAMES: Final = 8
"""From a warning here to the user's line."""


def compile_for_all(
    board: FailureBoard | None,
    asked: CompileArguments,
    request: Request,
    agreed: Mapping[str, str],
    sizes: Callable[[], SharedTraceCompiler],
) -> CompilationResult:
    """What this rank runs. All ranks call it, in agreement on the request, which is `agreed` as text. `sizes` gives the other compilations
    of the program. Raises MeshcError: what rank 0 meets, those raise that would have taken its program."""
    first = board is None or board.rank == 0
    hook = _watching() if first else None
    with progress.show_progress(asked.name, hook, wanted=first) as told, fewer_collections():  # texts of programs are many objects too
        folder = cache_entry.folder(asked.options) if first else None
        if board is None and folder is None:
            return _compile_here(sizes, request, told)
        stock_models.learn_trees(request.module)
        if first:
            entry = None if folder is None else cache_entry.CacheEntry(folder, asked.options, agreed, request)
            new = partial(_new, sizes, request, check_after_passes(board, told), entry)
            return new()[0] if board is None else _send_result(board, request, new)
        assert board is not None
        return _receive_result(board, request, lambda: _compile_here(sizes, request, check_after_passes(board, _watching())))


def _compile_here(sizes: Callable[[], SharedTraceCompiler], request: Request, hook: Hook | None) -> CompilationResult:
    """Result of own passes. Where a number of Python cannot be an input of a program, those are none that came last, down to it."""
    why = ""
    for count in range(len(request.numbers), -1, -1):
        try:
            return replace(
                CompilationResult.from_passes(*sizes().compile(replace(request, numbers=request.numbers[:count]), hook)), kept_fixed=why
            )
        except CaptureError as error:
            if not count:
                raise
            why = ", ".join(line.strip() for line in str(error).splitlines()[:2])
    raise AssertionError


def _watching() -> Hook | None:
    """The hook after each pass that the environment requests; None without."""
    return hooks.hook(passcheck.PassCheck()) if environment.watching() else None


def _new(
    sizes: Callable[[], SharedTraceCompiler], request: Request, hook: Hook | None, entry: cache_entry.CacheEntry | None
) -> tuple[CompilationResult, Dependencies]:
    """The result from the on-disk cache, or of the passes, then written to the cache; and its dependencies on Python."""
    taken = None if entry is None else entry.load()
    if taken is not None:
        return taken
    found = _compile_here(sizes, request, hook)
    read = found.dependencies()
    return (found if entry is None else entry.keep(found, read)), read


def _send_result(board: FailureBoard, request: Request, new: Callable[[], tuple[CompilationResult, Dependencies]]) -> CompilationResult:
    """Compiles on rank 0, and sends the result to all ranks."""
    turn = compare.next_turn()
    compare.delete_sent(board)
    with compare.raised_on_all(board, turn):
        found, read = new()
    why = read.why
    try:
        data = b"" if why else compilation_result.pack_program(found.program, **found.extra_data(), seconds=dict(found.seconds or {}))
    except (ArtifactError, NotPlainData) as error:
        why, data = str(error), b""
    told = replace(read, why=why).to_json() | {"optimizer": job_key.describe_optimizer(request.optimizer)}
    told["verifies"] = bool(environment.verifying())
    compare.send(board, turn, json.dumps(told).encode() + b"\n" + data)
    if why:
        warnings.warn(
            f"every rank compiles this program for itself, since rank 0's cannot serve the others: {why}\n"
            "  what to do: nothing, if that is meant; it takes the time of a compilation on every rank",
            stacklevel=_FRAMES,
        )
    return replace(found, given=not why, compared=tuple(read.values))


def _receive_result(board: FailureBoard, request: Request, alone: Callable[[], CompilationResult]) -> CompilationResult:
    """Rank 0's program; where it cannot serve this rank, what `alone` compiles."""
    head, _, data = compare.receive(board, compare.next_turn()).partition(b"\n")
    began, told = time.monotonic(), json.loads(head)
    read = Dependencies.from_json(told)
    if told["why"] or (environment.verifying() and not told["verifies"]):
        return replace(alone(), compared=tuple(read.values))
    lines = [*read.differences(compilation_result.process_values(request))]
    if told["optimizer"] != job_key.describe_optimizer(request.optimizer):
        lines.append("the optimizer's state, or its update, is another one")
    why = changes_text(lines)
    if not lines:
        try:
            program, result = compilation_result.unpack_program(data, request.mesh)
            found = CompilationResult.from_data(program, request, result, result["seconds"])
            if environment.log_level():
                print(f"meshc: rank 0's program, taken in {time.monotonic() - began:.2f} s", file=sys.stderr)
            return replace(found, given=True, compared=tuple(read.values))
        except (ArtifactError, NotPlainData) as error:
            why = str(error)
    warnings.warn(
        f"rank {board.rank} compiles this program for itself, and does not take rank 0's: {why}\n"
        "  why: the model's code has read this on rank 0, so that another program may come of it; they are compared before they run\n"
        "  what to do: give every rank the same, where that is possible; it saves the time of a compilation",
        stacklevel=_FRAMES,
    )
    return replace(alone(), compared=tuple(read.values))


def for_outputs(board: FailureBoard | None, found: CompilationResult, received: Collection[str]) -> PlainProgram:
    """The program whose backward begins at the outputs named in `received`. All ranks call it, for the same outputs."""
    turn = None if board is None else compare.next_turn()
    if found.lowered is None and board is not None and turn is not None and board.rank > 0:
        return _with_backward_given(board, turn, found.program)
    if board is None or turn is None or not found.given:
        return _specialise_outputs(found, received)
    compare.delete_sent(board)
    with compare.raised_on_all(board, turn):
        program = _specialise_outputs(found, received)
        data = compilation_result.pack_program(replace(program, stages={"backward": program.stages["backward"]}, schedule=(), constants={}))
    compare.send(board, turn, data)
    return program


def _specialise_outputs(found: CompilationResult, received: Collection[str]) -> PlainProgram:
    """One that was kept from an earlier start has one backward for all sets of outputs, or it would not have been kept."""
    return found.program if found.lowered is None else driver.specialise_backward(found.program, found.lowered, received)


def _with_backward_given(board: FailureBoard, turn: int, program: PlainProgram) -> PlainProgram:
    """The program with the backward that rank 0 gives."""
    given, _ = compilation_result.unpack_program(compare.receive(board, turn), program.mesh)
    return replace(program, stages={**program.stages, **given.stages}, inputs=given.inputs, outputs=given.outputs)
