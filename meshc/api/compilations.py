"""The compilations of one program: one for each kind of call, kept under its key; compiled once, loaded, found again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from meshc.api import cached_calls, module_mode, shared
from meshc.api.asked import Asked, Key
from meshc.api.made import Made
from meshc.api.world import Context, World
from meshc.errors import InputError, MeshcError, StateError
from meshc.frontend import calling, side_effects
from meshc.optimizer.optimizer import OptimizerSpec, changes, describe
from meshc.optimizer.step_hooks import refuse_pre_hooks
from meshc.passes.lower.exposed import EXPOSED
from meshc.passes.phases.request import Request
from meshc.plan.plan import Plan
from meshc.program import instance
from meshc.program.program import PlainProgram
from meshc.runtime.agreement import agreed
from meshc.runtime.agreement.compare import Disagreement
from meshc.runtime.failure.failed_rank import FailureBoard
from meshc.runtime.run.executor import Executor
from meshc.runtime.run.session import Session
from meshc.runtime.state.optimizer_state import follow
from meshc.runtime.state.ownership import calls_allowed, guard_calls
from meshc.runtime.state.store import Store

WARNED = ("has no rule", "nothing but padding", "does the whole work", side_effects.LEFT_OUT, EXPOSED)
"""Words of the notes of a compilation that are warnings."""


@dataclass(frozen=True)
class Compilation:
    """One of them.

    program  at the sizes of its calls
    made     what was compiled: what serves all sizes, and under which request
    session  the program at work on this rank; None without a process group
    """

    program: PlainProgram
    made: Made
    session: Session | None


class Compilations:
    """By key: input structure, shapes, dtypes, training flags, requires_grad, grad mode, autocast, the optimizer's branches."""

    def __init__(self, asked: Asked, world: World, adopted: Callable[[], None]) -> None:
        """adopted: what is done when the model's parameters have become this rank's parts."""
        self.asked, self.world, self._adopted = asked, world, adopted
        self._described_over: Store | None = None
        """Whose parameters the optimizers had when they were described."""
        self.spec = self._describe()
        self.kept: dict[Key, Compilation] = {}
        self.general: dict[Key, Made] = {}
        self.seconds: dict[str, float] = {}
        """By pass, of the last that was compiled; rank 0's, if its program was taken."""
        self.store: Store | None = None
        self._known: list[str] = []
        self._last: Compilation | None = None

    def _describe(self) -> OptimizerSpec | None:
        """What the optimizers are, over the parameters that another program of the model may have put in the place of theirs."""
        step, store = self.asked.step, Store.of(self.asked.module)
        if step is None:
            return None
        self._described_over = store
        if store is None:
            return describe(step.optimizers, self.asked.options.keeping)
        follow(store, step.optimizers)
        spec = describe(step.optimizers, self.asked.options.keeping)
        return replace(spec, idle=tuple((store.live(parameter), who) for parameter, who in spec.idle))

    @property
    def last(self) -> Compilation:
        """The one that was called last."""
        if self._last is None:
            raise StateError("nothing is compiled yet: call the program, or give example inputs to meshc.compile")
        return self._last

    @property
    def compiled(self) -> bool:
        """Whether there is one."""
        return self._last is not None

    @property
    def plan(self) -> Plan:
        """That of the last one; before there is any, what was asked for."""
        return self.asked.plan if self._last is None else self._last.program.plan

    def guarded(self, what: str) -> Context:
        """A context for one thread, in which this rank's failure reaches the others, and theirs this one."""
        return self.world.guarded(what, self.store.step if self.store else 0)

    def admit(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[tuple[object, ...], dict[str, object], Key]:
        """What a call passes, by name, and the key of its compilation; a part of another shape is refused."""
        asked = self.asked
        with self.world.refusable():
            args, kwargs = asked.by_name(args, kwargs)
            if asked.dynamic:
                asked.dynamic.sizes(asked.shapes(*asked.whole((args, kwargs))))
            elif asked.inputs == "local" and self._known:
                self._refuse_other_shapes(args, kwargs)
            return args, kwargs, asked.key(args, kwargs, self.spec)

    def _refuse_other_shapes(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """With inputs="local", a part of another shape would stop the other ranks: it is refused, before anything is sent."""
        mine = calling.describe_inputs(args, kwargs)
        if mine not in self._known:
            raise InputError(calling.unequal_parts(f"this rank passed {mine}; the program takes {' or '.join(self._known)}"))

    def prepare(self, args: tuple[object, ...], kwargs: dict[str, object], key: Key) -> Compilation:
        """The compilation for a call that `admit` has taken. All ranks call it."""
        if key not in self.kept:
            with self.guarded("compile"):
                if self.world.board is not None:
                    self.world.agree_on_request(agreed.before_compiling(self.asked, args, kwargs, key), self._refusal)
                self.kept[key] = self._compile(args, kwargs, key)
                self._known.append(calling.describe_inputs(args, kwargs))
                if self.asked.dynamic and len(self.kept) > instance.KEPT:
                    del self.kept[next(iter(self.kept))], self._known[0]
        self._last = self.kept[key] = self.kept.pop(key)  # the one that was used last is dropped last
        return self._last

    def _refusal(self, difference: Disagreement) -> MeshcError:
        if difference.field != agreed.INPUTS:
            return StateError(str(difference))
        if difference.alone:
            text = f"this rank passed {difference.mine}; rank {difference.other} passed what the program takes, {' or '.join(self._known)}"
        else:
            text = f"this rank passed {difference.mine}; rank {difference.other} passed {difference.theirs}"
        if self.asked.inputs == "local":
            return InputError(calling.unequal_parts(text))
        return InputError(
            f'inputs="global" takes the same inputs on every rank: {text}\n'
            '  what to do: pass the whole batch everywhere, or compile with inputs="local" if each rank has its own part'
        )

    # -------------------------------------------------------------------------------------------------------------- compiling

    def request(self, args: tuple[object, ...], kwargs: dict[str, object], **changes: Any) -> Request:
        """What the passes are asked for now; changes: fields of the request."""
        store = self.store or Store.of(self.asked.module)
        return self.asked.request(args, kwargs, self.spec, store, **changes)

    def _compile(self, args: tuple[object, ...], kwargs: dict[str, object], key: Key) -> Compilation:
        asked = self.asked
        if asked.step is not None:
            with self.world.refusable():
                refuse_pre_hooks(asked.step.optimizers)
            if Store.of(asked.module) is not self._described_over:
                self.spec = self._describe()
        if self.kept and self.spec is not None and asked.step is not None:
            lines = changes(next(reversed(self.kept)).optimizer, key.optimizer)
            if lines:
                warnings.warn("meshc compiles again, because of the optimizer: " + "; ".join(lines), stacklevel=5)
                self.spec = describe(asked.step.optimizers, asked.options.keeping)
        examples = asked.whole((args, kwargs))
        general_key = asked.general_key(args, kwargs, key)
        if general_key not in self.general:
            self.general[general_key] = self._compile_general(*examples)
        made = self.general[general_key]
        with self.world.refusable():
            own = instance.fitting(made.program, dict(asked.shapes(*examples)))
        if not self.world.has_ranks:
            return Compilation(own, made, None)
        made = self.general[general_key] = self._adopt(own, made)
        return Compilation(own, made, self._load(own, made))

    def _compile_general(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Made:
        asked = self.asked
        request = self.request(args, kwargs)
        with self.world.refusable(), calls_allowed(asked.module), torch.set_grad_enabled(request.grad):
            if request.grad and asked.step is None:
                module_mode.refuse_partial_storage(asked.plan)
                module_mode.refuse_stages(asked.mesh)
            with cached_calls.explained(kwargs):
                made = shared.compiled(self.world.board, asked, request)
        for note in made.program.notes:
            if any(words in note for words in WARNED):
                warnings.warn(note, stacklevel=6)
        self.seconds = dict(made.seconds or {})
        return made

    def _adopt(self, compiled: PlainProgram, made: Made) -> Made:
        """Parameters, buffers and state become this rank's parts. Returns what was made without a hold on what they were."""
        asked, world = self.asked, self.world
        world.agree_on_program(compiled, asked.module)
        first = Store.of(asked.module) is None
        owners = compiled.pipeline.owners if compiled.pipeline is not None else {}
        store = self.store = Store.adopt(asked.module, compiled.inputs, asked.mesh, world.device, world.groups, owners)
        self._adopted()
        if asked.step is not None:
            guard_calls(asked.module)
        if asked.step is not None:
            store.adopt_optimizer(asked.step.optimizers, compiled.inputs, self.spec)
            self.spec = None if self.spec is None else self.spec.of_live(store.live)
            self._described_over = store
        if first:
            seed = torch.initial_seed() if asked.options.seed is None else asked.options.seed
            store.seed = world.from_rank_0(lambda: seed)
        return made if asked.step is None else made.updating(self.spec)

    def _load(self, compiled: PlainProgram, made: Made) -> Session:
        """`compiled` at work on this rank: what was made, at some sizes."""
        asked, world, store = self.asked, self.world, self.store
        assert store is not None
        coordinates = asked.mesh.coordinates(dist.get_rank())
        executor = Executor(compiled, world.groups, coordinates, world.device, world.board)
        make = partial(_specialised, world.board, compiled, made)
        return Session(compiled, store, executor, made.tree, asked.options.cuda_graph, make, asked.options.check_inputs)


def _specialised(board: FailureBoard | None, compiled: PlainProgram, made: Made, received: Collection[str]) -> PlainProgram:
    """`compiled` with the backward for the outputs that received gradients."""
    shapes = {port.name: port.shape for port in compiled.inputs if port.kind == "input"}
    return instance.fitting(shared.for_outputs(board, made, received), shapes)
