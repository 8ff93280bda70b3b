"""One compilation for all ranks: rank 0 compiles, and the others take its program as data, if they would have compiled the same.

    rank 0   what its model's Python is ──> all     compiles ........................ the program ──> all     hash
    rank 1   the same: waits ...........................................................  reads it            hash
    rank 2   norm.eps differs: warns, compiles for itself .............................                       hash

Before, all have agreed on inputs, model, plan, options, optimizer (`meshc.runtime.agreement.agreed`); behind it they compare the hashes of
what they have, as ever. So ranks that differ get the error that they would get if each compiled for itself, and ranks that differ in what
no forward reads get their program (`docs/decisions/0031-rank-0-compiles.md`).
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

import torch
from torch import nn

from meshc import environment, errors
from meshc.api import kept, made, progress
from meshc.api.asked import Asked
from meshc.api.kept import Ran
from meshc.api.made import Made
from meshc.errors import ArtifactError, CaptureError, MeshcError, PeerError
from meshc.frontend import reachable, stock
from meshc.frontend.output_tree_data import NoData
from meshc.frontend.spared import fewer_collections
from meshc.ir import trees
from meshc.later import Later
from meshc.ops.registered import RULES
from meshc.optimizer.optimizer import OptimizerSpec, members_of
from meshc.passes.phases.request import Request
from meshc.passes.phases.single import Hook
from meshc.program.program import PlainProgram
from meshc.runtime.agreement import handed
from meshc.runtime.failure.failed_rank import FailureBoard, listening

if TYPE_CHECKING:
    from meshc.passes.driver import compile as driver
    from meshc.passes.driver import hooks
    from meshc.passes.driver.sizes import Sizes
    from meshc.runtime.simulator import passcheck
else:  # who takes a program, from rank 0 or from disk, needs no passes
    driver, hooks = Later("meshc.passes.driver.compile"), Later("meshc.passes.driver.hooks")
    passcheck = Later("meshc.runtime.simulator.passcheck")

_FRAMES: Final = 9
"""From a warning here to the user's line."""
_OF_ALL_MODULES: Final = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")


def compiled(board: FailureBoard | None, asked: Asked, request: Request, agreed: Mapping[str, str], sizes: Callable[[], Sizes]) -> Made:
    """What this rank runs. All ranks call it, in agreement on the request, which is `agreed` as text. `sizes` gives the other compilations
    of the program. Raises MeshcError: what rank 0 meets, those raise that would have taken its program."""
    first = board is None or board.rank == 0
    hook = _watching() if first else None
    with progress.shown(asked.name, hook, wanted=first) as told, fewer_collections():  # texts of programs are many objects too
        return _compiled(board, asked, request, agreed, sizes, told)


def _compiled(
    board: FailureBoard | None, asked: Asked, request: Request, agreed: Mapping[str, str], sizes: Callable[[], Sizes], hook: Hook | None
) -> Made:
    first = board is None or board.rank == 0
    folder = kept.folder(asked.options) if first else None
    if board is None and folder is None:
        return _made(sizes, request, hook)
    stock.learn_trees(request.module)
    mine = reachable.reachable(request.module, _roots(asked, request))
    if first:
        entry = None if folder is None else kept.Entry(folder, mine, agreed, request)
        new = partial(_new, sizes, request, mine, listening(board, hook), entry)
        return new()[0] if board is None else _given(board, mine, new)
    assert board is not None
    found = _taken(board, request, mine)
    return _made(sizes, request, listening(board, _watching())) if found is None else found


def _made(sizes: Callable[[], Sizes], request: Request, hook: Hook | None) -> Made:
    """By this rank's passes. Where a number of Python cannot be an input of a program, those are none that came last, down to it."""
    why = ""
    for count in range(len(request.numbers), -1, -1):
        try:
            return replace(Made.of(*sizes().compile(replace(request, numbers=request.numbers[:count]), hook)), kept_fixed=why)
        except CaptureError as error:
            if not count:
                raise
            why = ", ".join(line.strip() for line in str(error).splitlines()[:2])
    raise AssertionError


def _watching() -> Hook | None:
    """What is done after each pass, if the environment asks for anything."""
    return hooks.hook(passcheck.PassCheck()) if environment.watching() else None


def _new(
    sizes: Callable[[], Sizes], request: Request, mine: reachable.Reachable, hook: Hook | None, entry: kept.Entry | None
) -> tuple[Made, Ran]:
    """What an earlier start has kept, or what the passes make, kept for a next one."""
    taken = None if entry is None else entry.taken()
    if taken is not None:
        return taken
    found = _made(sizes, request, hook)
    assert found.lowered is not None
    code = (*found.lowered.model.code, *reachable.forwards(request.module))  # of layers that were proved equal some are not traced
    ran = Ran(mine.why or mine.beyond(code), reachable.environment(code))
    return (found if entry is None else entry.keep(found, ran)), ran


def _given(board: FailureBoard, mine: reachable.Reachable, new: Callable[[], tuple[Made, Ran]]) -> Made:
    """Rank 0 compiles, and gives what it has."""
    first, second = handed.next_turn(), handed.next_turn()
    handed.delete_sent(board)
    handed.send(board, first, json.dumps({"why": mine.why, "places": mine.places, "verifies": environment.verifying()}).encode())
    try:
        found, ran = new()
    except PeerError:
        raise
    except MeshcError as error:
        handed.send(board, second, _refused(error))
        raise
    why = ran.why
    try:
        data = b"" if why else made.given(found)
    except (ArtifactError, NoData) as error:
        why, data = str(error), b""
    handed.send(board, second, json.dumps({"why": why, "environment": ran.environment}).encode() + b"\n" + data)
    if why:
        warnings.warn(
            f"every rank compiles this program for itself, since rank 0's cannot serve the others: {why}\n"
            "  what to do: nothing, if that is meant; it takes the time of a compilation on every rank",
            stacklevel=_FRAMES,
        )
    return found if why else replace(found, given=True)


def _refused(error: MeshcError) -> bytes:
    return json.dumps({"kind": type(error).__name__, "text": str(error)}).encode() + b"\n"


def _raised(told: Mapping[str, str]) -> MeshcError:
    error: MeshcError = getattr(errors, told["kind"], MeshcError)(told["text"])
    return error


def _taken(board: FailureBoard, request: Request, mine: reachable.Reachable) -> Made | None:
    """Rank 0's program, or None where this rank is to compile for itself."""
    first, second = handed.next_turn(), handed.next_turn()
    told = json.loads(handed.receive(board, first))
    if told["why"] or (environment.verifying() and not told["verifies"]):
        return None
    why = mine.why or reachable.difference(mine.places, told["places"])
    if not why:
        head, _, data = handed.receive(board, second).partition(b"\n")
        began, told = time.monotonic(), json.loads(head)
        if "kind" in told:
            raise _raised(told)
        if told["why"]:
            return None
        why = reachable.difference(reachable.variables_of(told["environment"]), told["environment"])
        if not why:
            try:
                found = made.taken(data, request)
                if environment.log_level():
                    print(f"meshc: rank 0's program, taken in {time.monotonic() - began:.2f} s", file=sys.stderr)
                return found
            except (ArtifactError, NoData) as error:
                why = str(error)
    warnings.warn(
        f"rank {board.rank} compiles this program for itself, and does not take rank 0's: {why}\n"
        "  why: a model's forward can read this, so that another program may come of it; the programs are compared before they run\n"
        "  what to do: give every rank the same, where that is possible; it saves the time of a compilation",
        stacklevel=_FRAMES,
    )
    return None


def for_outputs(board: FailureBoard | None, found: Made, received: Collection[str]) -> PlainProgram:
    """The program whose backward begins at the outputs named in `received`. All ranks call it, for the same outputs."""
    turn = None if board is None else handed.next_turn()
    if found.lowered is None and board is not None and turn is not None and board.rank > 0:
        return _with_backward_given(board, turn, found.program)
    if board is None or turn is None or not found.given:
        return _specialised(found, received)
    handed.delete_sent(board)
    try:
        program = _specialised(found, received)
        data = made.packed(replace(program, stages={"backward": program.stages["backward"]}, schedule=(), constants={}))
    except PeerError:
        raise
    except MeshcError as error:
        handed.send(board, turn, _refused(error))
        raise
    handed.send(board, turn, b"\n" + data)
    return program


def _specialised(found: Made, received: Collection[str]) -> PlainProgram:
    """One that was kept from an earlier start has one backward for all sets of outputs, or it would not have been kept."""
    return found.program if found.lowered is None else driver.specialised(found.program, found.lowered, received)


def _with_backward_given(board: FailureBoard, turn: int, program: PlainProgram) -> PlainProgram:
    """The program with the backward that rank 0 gives."""
    head, _, data = handed.receive(board, turn).partition(b"\n")
    if head:
        raise _raised(json.loads(head))
    given, _ = made.unpacked(data, program.mesh)
    return replace(program, stages={**program.stages, **given.stages}, inputs=given.inputs, outputs=given.outputs)


# ------------------------------------------------------------------------------------------------------------------- what is compared


def _roots(asked: Asked, request: Request) -> dict[str, object]:
    """What a compilation calls or reads of the user's, beside the model."""
    leaves, spec = trees.flatten((request.args, dict(request.kwargs)))
    found: dict[str, object] = {
        "the inputs": [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)],
        "the inputs' structure": _contexts(spec),
        "the function": None if isinstance(asked.what, nn.Module) or asked.step is not None else asked.what,
        "the loss": asked.step.loss if asked.step is not None else None,
        "the option schedule": asked.options.schedule,
        "the registered rules": {str(op): (given.rule, dict(given.fields)) for op, given in RULES.items()},
        "the model's storage": str(sorted((name, str(sharding)) for name, sharding in request.fixed.items()) + sorted(request.parked)),
        "the model's stages": str(sorted(request.owners.items())),
    }
    for name in _OF_ALL_MODULES:
        found[f"torch's {name[1:]}"] = list(getattr(torch.nn.modules.module, name).values())
    return found | _of_optimizer(asked, request.optimizer)


def _contexts(spec: trees.Spec) -> list[object]:
    """What stands in a tree beside its leaves: classes, keys, functions of a mask."""
    return [spec.type, spec.context, *map(_contexts, spec.children())]


def _of_optimizer(asked: Asked, spec: OptimizerSpec | None) -> dict[str, object]:
    """Its state's form, and of a class that is not torch's what it is: its update is traced."""
    if asked.step is None or spec is None:
        return {}
    slots = [[[(s.name, s.shape, s.size, s.dtype, s.fill, s.python) for s in one] for one in group.slots] for group in spec.groups]
    found: dict[str, object] = {"the optimizer's state": str(slots)}
    for index, member in enumerate(members_of(asked.step.optimizers)):
        kind = type(member)
        if kind.__module__.startswith("torch.optim"):
            continue
        left_out = ("state", "param_groups", "defaults")
        held = {name: value for name, value in vars(member).items() if name not in left_out and not name.endswith("_hooks")}
        found |= {f"optimizer {index}": held, f"optimizer {index}, class": kind, f"optimizer {index}, step": kind.step}
    return found
