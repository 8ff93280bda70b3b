"""Compilations of one program by key, one for each kind of call: compiled or loaded once, then reused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshc.api import batch_parts, cached_calls, job_key, module_mode, shared_compilation, value_keys
from meshc.api.compilation_result import CompilationResult
from meshc.api.compile_arguments import Arguments, CompilationKey, CompileArguments, KnownCall
from meshc.api.value_keys import ValueKeys
from meshc.api.world import Context, World
from meshc.errors import InputError, MeshcError, StateError
from meshc.frames import warn_at_users_line
from meshc.frontend import call_keys, side_effects
from meshc.frontend.listed_experts import ZEROS
from meshc.frontend.module_watch import ModuleState
from meshc.frontend.read_values import Reads
from meshc.ir import trees
from meshc.ir.mesh import Mesh
from meshc.lazy_module import LazyModule
from meshc.optimizer.optimizer import OptimizerSpec, changes, describe, members_of
from meshc.optimizer.optimizer_set import Optimizers
from meshc.optimizer.step_hooks import refuse_pre_hooks
from meshc.passes.lower.exposed_copies import EXPOSED
from meshc.passes.phases.request import Request
from meshc.plan.plan import Plan
from meshc.plan.split_axes import parts_between, with_axes_apart
from meshc.program import instance
from meshc.program.program import PlainProgram
from meshc.runtime.agreement import descriptions
from meshc.runtime.agreement.compare import Disagreement
from meshc.runtime.comm.uneven_rows import UnevenBatch
from meshc.runtime.failure.failed_rank import FailureBoard
from meshc.runtime.failure.step_numbers import Stream
from meshc.runtime.run.executor import Executor
from meshc.runtime.run.session import Session
from meshc.runtime.state.optimizer_state import refuse_shared, replace_live_parameters
from meshc.runtime.state.ownership import calls_allowed
from meshc.runtime.state.store import Store

if TYPE_CHECKING:
    from meshc.passes.driver import shared_trace
else:
    shared_trace = LazyModule("meshc.passes.driver.shared_trace")

OTHER_SIZES = (
    "\n  why: every rank passes the whole batch, and has run the program of another size: what it sent is no part of theirs\n"
    '  what to do: load the same batches on every rank, or compile with inputs="local" if each rank has its own part. Go on from a state\n'
    "  that was saved before that step"
)
WARNED = ("has no rule", "nothing but padding", "does the whole work", side_effects.LEFT_OUT, side_effects.NOT_LOOKED_AT, EXPOSED, ZEROS)
"""Words of the notes of a compilation that are warnings, each once for all sizes."""


@dataclass(frozen=True)
class Compilation:
    """A compiled program at the sizes of its calls.

    program  at the sizes of its calls
    made     what was compiled: what serves all sizes, and under which request
    session  the program at work on this rank; None without a process group
    reads    what of Python it was made of, as this rank has it
    agreed   what ranks agreed on before it, by field
    """

    program: PlainProgram
    made: CompilationResult
    session: Session | None
    reads: Reads
    agreed: Mapping[str, str]


class AdmittedCall(NamedTuple):
    """A checked call, with its key.

    arguments   gives them by name; of parts of unequal numbers of rows, the whole batch as shapes
    known       what is known of the calls that look like it
    key         of its compilation
    tensors     what this rank has passed
    state       one object as long as the module is as it is
    optimizers  of a training step those that step now
    dealt       how such parts become tiles; None where they are tiles
    cached      what it was before, if it has a cache, or is an encoder's
    """

    arguments: Callable[[], Arguments]
    known: KnownCall
    key: CompilationKey
    tensors: list[torch.Tensor]
    state: ModuleState
    optimizers: Optimizers | None
    dealt: UnevenBatch | None
    cached: cached_calls.PaddedCall | None


class Compilations:
    """By key: input structure, shapes, dtypes, training flags, requires_grad, grad mode, autocast, the optimizer's branches, and the Python
    values that the program was made of."""

    def __init__(self, asked: CompileArguments, world: World, adopted: Callable[[], None]) -> None:
        """adopted: called after the model's parameters have been replaced by this rank's tiles."""
        self.asked, self.world, self._adopted = asked, world, adopted
        self._described_over: Store | None = None
        """The store whose parameters the optimizers had when `spec` was built."""
        self.spec = self._describe()
        self.kept: dict[CompilationKey, Compilation] = {}
        self.general: dict[CompilationKey, CompilationResult] = {}
        self.seconds: dict[str, float] = {}
        """Seconds by pass of the last compilation; rank 0's, if its program was loaded."""
        self.store: Store | None = None
        self.value_keys = ValueKeys(asked.module)
        self._several = False
        """Whether the kept compilations are for inputs of several forms."""
        self._called: Stream | None = None
        """Which sizes calls have, once there are several, for the comparison with the other ranks."""
        self._tokens: Stream | None = None
        """Likewise what calls with a cache pass."""
        self._last: Compilation | None = None
        self._last_key: CompilationKey | None = None

    @cached_property
    def _sizes(self) -> shared_trace.SharedTraceCompiler:
        """State shared by compilations with equal Python values, where passes run on this rank."""
        return shared_trace.SharedTraceCompiler()

    def _describe(self) -> OptimizerSpec | None:
        """What the optimizers are, over the parameters that another program of the model may have put in the place of theirs."""
        step, store = self.asked.step, Store.of(self.asked.module)
        if step is None:
            return None
        self._described_over = store
        if store is None:
            return describe(step.optimizers, self.asked.options.training)
        replace_live_parameters(store, step.optimizers)
        spec = describe(step.optimizers, self.asked.options.training)
        return replace(spec, idle=tuple((store.live(parameter), who) for parameter, who in spec.idle))

    @property
    def last(self) -> Compilation:
        """The compilation that was called last."""
        if self._last is None:
            raise StateError("nothing is compiled yet: call the program, or give example inputs to meshc.compile")
        return self._last

    @property
    def has_compilation(self) -> bool:
        """Whether any compilation exists."""
        return self._last is not None

    @property
    def plan(self) -> Plan:
        """The plan of the last compilation; before any, the requested plan."""
        return self.asked.plan if self._last is None else self._last.program.plan

    def failure_guard(self, what: str) -> Context:
        """A context for one thread, in which a failure on any rank is raised on all."""
        return self.world.failure_guard(what, self.store.step if self.store else 0)

    def admit(self, given: Arguments) -> AdmittedCall:
        """A call's arguments and the key of its compilation. Raises InputError for what no compilation takes; of parts of a batch, which
        ranks tell each other of, also where they do not fit together."""
        asked = self.asked
        with self.world.refusable():
            cached = cached_calls.pad_cached_call(asked, given)
            given = given if cached is None else (cached.args, cached.kwargs)
            leaves, form = asked.forms.of(given)
            state = asked.state
            optimizers = asked.step.optimizers if asked.step else None
            context = asked.context_key(state, self.spec, optimizers)
            known = None if form is None else form.keys.get(context)
            arguments = partial(asked.by_name, given)
            if known is not None and not self._tells_rows:
                key = self.value_keys.key(known.base, self.kept, state)
                return AdmittedCall(arguments, known, key, [leaves[at] for at in known.places], state, optimizers, None, cached)
            own = arguments() if known is None else asked.in_order(given)
        counts = self._counts(own) if self._tells_rows else None
        whole = own if counts is None else batch_parts.whole(asked, own, counts)
        with self.world.refusable():
            if known is None:
                if asked.dynamic:
                    asked.dynamic.sizes(asked.shapes(self._examples(whole)))
                known = KnownCall(CompilationKey(call_keys.input_key(*whole), *context))
                if form is not None and counts is None:
                    known.places = asked.tensor_places(given, leaves)
                    form.keys[context] = known
            tensors = [leaf for leaf in trees.leaves(own) if isinstance(leaf, torch.Tensor)]
            key = self.value_keys.key(known.base, self.kept)
            dealt = None if counts is None else self._dealt(counts)
            return AdmittedCall(lambda: whole, known, key, tensors, state, optimizers, dealt, cached)

    @property
    def _tells_rows(self) -> bool:
        """Whether ranks tell each other at each call how many rows their parts of the batch have."""
        uneven = self.asked.options.local_inputs.uneven_rows
        return self.asked.inputs == "local" and self.world.has_ranks and (uneven or self._several)

    def _counts(self, passed: Arguments) -> list[int] | None:
        """Rows of each data rank's part, if they may differ, else None. Raises InputError if they must not differ but do."""
        counts = batch_parts.count_rows(self.asked, self.world, passed)
        if self.asked.options.local_inputs.uneven_rows:
            return counts
        batch_parts.refuse_unequal(counts)
        return None

    def _dealt(self, counts: Collection[int]) -> UnevenBatch:
        mesh, world = self.asked.mesh, self.world
        axes = mesh.data_axes
        world.groups.prepare([axes])
        sizes = [mesh.size(name) for name in axes]
        return UnevenBatch(tuple(counts), axes, sizes, world.groups.group(axes), partial(self.failure_guard, "move rows"))

    def _examples(self, inputs: Arguments) -> Arguments:
        """The inputs of the whole batch, for tracing."""
        uneven = self.asked.options.local_inputs.uneven_rows and self.world.has_ranks
        return inputs if uneven else self.asked.whole_batch(inputs)

    def prepare(self, call: AdmittedCall) -> Compilation:
        """The compilation for a call that `admit` has taken. All ranks call it."""
        key = call.key
        if self._last is not None and self._last_key is key:
            return self._last
        changed = self.value_keys.changes(key)
        if key not in self.kept:
            inputs = call.arguments()
            with self.failure_guard("compile"):
                with self.world.refusable():
                    if (store := self._store_there) is not None:
                        store.refuse_changed_model()  # before it is traced as something else than the store holds
                self._follow_store()
                told = job_key.describe_compilation(self.asked, inputs, key)
                because = descriptions.VALUES if changed else descriptions.INPUTS
                mine, refusal = told | {descriptions.VALUES: "; ".join(changed)}, partial(self._refusal, told)
                self.world.agree("compile", mine, advice=descriptions.advice, ahead=because, error=refusal)
                if changed or self.value_keys.stale():
                    self.__dict__.pop("_sizes", None)  # what they share was traced with other values
                key, compilation = self._compile(call, changed, told)
                self.kept[key] = compilation
                if len(self.kept) > self.asked.options.debugging.kept_sizes:
                    del self.kept[oldest := next(iter(self.kept))]  # not used for longest, on all ranks the same: calls come in one order
                    if not self.asked.dynamic:
                        del self.general[oldest]
                self._several = len({each.inputs for each in self.kept}) > 1
        elif changed:
            self.world.agree("call", {descriptions.VALUES: "; ".join(changed)}, error=partial(self._refusal, {}))
        self.value_keys.note(key)
        self._last_key, self._last = key, self.kept.pop(key)
        self.kept[key] = self._last  # the one that was used last is dropped last
        return self._last

    def compare(self, call: AdmittedCall) -> None:
        """Beside the call ranks compare what it passes: the tokens behind a cache; its sizes, where each rank may have a program of its
        own for them and nothing else has compared them."""
        board, cached = self.world.board, call.cached
        if board is None:
            return
        if cached is not None:
            self._tokens = self._tokens or board.numbers.stream("the tokens of program", cached_calls.ADVICE)
            self._tokens.note(*cached.compared_sizes())
        elif self._several and self.asked.inputs == "global":
            if call.known.sizes is None:
                rows = [(name.replace(".", "/"), shape) for name, shape in self.asked.shapes(call.arguments())]
                names = tuple(f"dim {dim} of {name}" for name, shape in rows for dim in range(len(shape)))
                call.known.sizes = names, tuple(int(size) for _, shape in rows for size in shape)
            self._called = self._called or board.numbers.stream("calls of several sizes, program", OTHER_SIZES)
            self._called.note(*call.known.sizes)

    @property
    def _store_there(self) -> Store | None:
        """The model's store, which another program of it may have made."""
        return self.store or Store.of(self.asked.module)

    def _follow_store(self) -> None:
        """Where the model lives on axes that were taken apart for another program, this one is for them too."""
        store, asked = self._store_there, self.asked
        parts = None if store is None else parts_between(asked.mesh, store.mesh)
        if parts and store is not None:
            self._move(store.mesh, with_axes_apart(asked.plan, parts))

    def _move(self, mesh: Mesh, plan: Plan) -> None:
        self.asked = self.asked.having(mesh=mesh, plan=plan)
        self.world.move(mesh)

    def _refusal(self, told: Mapping[str, str], difference: Disagreement) -> MeshcError:
        """What a difference is raised as. told: what this rank is about to compile from."""
        if difference.field == descriptions.VALUES:
            return StateError(descriptions.other_values(difference.mine, difference.other, difference.theirs, difference.alone))
        if difference.field != descriptions.INPUTS:
            return StateError(str(difference))
        if difference.alone and not self.kept:
            return StateError(
                f"this rank calls {self.asked.name}, which nobody has called yet, and rank {difference.other} does something else\n"
                "  what to do: call it on every rank, evaluation too: all ranks compute it together, and each has the result"
            )
        if difference.alone:
            setting = self._other_setting(told, difference.other)
            if setting is not None:
                return setting
            known = " or ".join(one.agreed[descriptions.INPUTS] for one in self.kept.values())
            text = f"this rank passed {difference.mine}; rank {difference.other} passed what the program takes, {known}"
        else:
            text = f"this rank passed {difference.mine}; rank {difference.other} passed {difference.theirs}"
        if self.asked.inputs == "local":
            return InputError(call_keys.unequal_parts(text))
        return InputError(
            f'inputs="global" takes the same inputs on every rank: {text}\n'
            '  what to do: pass the whole batch everywhere, or compile with inputs="local" if each rank has its own part'
        )

    def _other_setting(self, told: Mapping[str, str], other: int) -> StateError | None:
        """Where this rank passes what a program takes, and compiles since something else is not as it was: what that is, of the program
        that was called last, if it takes this."""
        for known in (self.kept[key].agreed for key in reversed(self.kept)):
            if known[descriptions.INPUTS] == told[descriptions.INPUTS]:
                fields = [name for name in told if told[name] != known.get(name)]
                rows = [
                    (str(Disagreement(name, told[name], other, known.get(name, "nothing"))), descriptions.advice(name)) for name in fields
                ]
                return StateError("\n".join(f"{text}\n  what to do: {advice}" for text, advice in rows)) if rows else None
        return None

    # -------------------------------------------------------------------------------------------------------------- compiling

    def request(self, given: Arguments, **changes: Any) -> Request:
        """What the passes are asked for now; changes: fields of the request."""
        return self.asked.request(given, self.spec, self._store_there, **changes)

    def _compile(self, call: AdmittedCall, changed: list[str], told: Mapping[str, str]) -> tuple[CompilationKey, Compilation]:
        """For a call, and the key of what it is for. changed: what its model reads, since the last."""
        inputs, key, asked = call.arguments(), call.key, self.asked
        if changed:
            self.value_keys.open(key)
        if because := value_keys.changes_from(reversed(self.kept), key):
            warnings.warn("meshc compiles again, because of what the model's code reads: " + value_keys.changes_text(because), stacklevel=5)
        if asked.step is not None:
            with self.world.refusable():
                refuse_pre_hooks(asked.step.optimizers)
                if (there := self._store_there) is not None:
                    refuse_shared(there, members_of(asked.step.optimizers))
            if Store.of(asked.module) is not self._described_over:
                self.spec = self._describe()
        if self.kept and self.spec is not None and asked.step is not None:
            lines = changes(next(reversed(self.kept)).optimizer, key.optimizer)
            if lines:
                warnings.warn("meshc compiles again, because of the optimizer: " + "; ".join(lines), stacklevel=5)
                self.spec = describe(asked.step.optimizers, asked.options.training)
        examples = self._examples(inputs)
        general_key = asked.general_key(inputs, key)
        if general_key not in self.general:
            made = self._compile_general(examples, told)
            if made.kept_fixed:
                warnings.warn(value_keys.fixed_numbers_note(self.value_keys.inputs, made), stacklevel=5)
            key, reads = self.value_keys.learn(call.known.base, made)
            general_key = asked.general_key(inputs, key)
        else:
            made = self.general[general_key]
            key, reads = self.value_keys.learn(call.known.base, made)
        asked.note_batch(made.program)
        examples = self._examples(inputs)  # passes may have found it along another dim
        with self.world.refusable():
            own = instance.program_for_shapes(made.program, dict(asked.shapes(examples)))
        if not self.world.has_ranks:
            self.general[general_key] = made
            return key, Compilation(own, made, None, reads, told)
        made = self.general[general_key] = self._adopt(own, made)
        return key, Compilation(own, made, self._load(own, made), reads, told)

    def _compile_general(self, inputs: Arguments, told: Mapping[str, str]) -> CompilationResult:
        asked = self.asked
        request = self.request(inputs, numbers=self.value_keys.inputs)
        with self.world.refusable(), calls_allowed(asked.module), torch.set_grad_enabled(request.grad):
            if request.grad and asked.step is None:
                module_mode.refuse_partial_storage(asked.plan)
                module_mode.refuse_stages(asked.mesh)
            with cached_calls.explain_refusal(request.kwargs):
                made = shared_compilation.compile_for_all(self.world.board, asked, request, told, lambda: self._sizes)
        made = self._on_its_mesh(made)
        if self.asked.plan.leaves_formats_open:  # what is chosen once holds for other sizes, too: they are one model's numbers
            self.asked = self.asked.having(plan=self.asked.plan.having(self.asked.plan.axes, precisions=made.program.plan.precisions))
        for note in made.program.notes:
            about = note.partition(" (")[0] if note.startswith("axis ") else note  # whatever its sizes are this time
            if any(words in note for words in WARNED) and about not in self.world.warned:
                self.world.warned.add(about)
                warn_at_users_line(note)
        self.seconds = dict(made.seconds or {})
        return made

    def _on_its_mesh(self, made: CompilationResult) -> CompilationResult:
        """Passes may have taken axes apart: the ranks are along these from here on. All ranks call it."""
        program, asked = made.program, self.asked
        if program.mesh == asked.mesh:
            return made
        mesh, devices = program.mesh, asked.mesh.device_mesh
        if devices is not None:
            table = devices.mesh.reshape([axis.size for axis in mesh.axes])
            mesh = Mesh.of(DeviceMesh(mesh.device_type, table, mesh_dim_names=tuple(mesh.names)))
        self._move(mesh, program.plan)
        return replace(made, program=replace(program, mesh=mesh))

    def _adopt(self, compiled: PlainProgram, made: CompilationResult) -> CompilationResult:
        """Parameters, buffers and state become this rank's parts. Returns what was made without a hold on what they were."""
        asked, world = self.asked, self.world
        world.agree_on_program(compiled, asked.module, made.compared_values)
        first = Store.of(asked.module) is None
        owners = compiled.pipeline.owners if compiled.pipeline is not None else {}
        store = self.store = Store.adopt(asked.module, compiled.inputs, asked.mesh, world.device, world.groups, owners)
        self._adopted()
        if asked.step is not None:
            store.adopt_optimizer(asked.step.optimizers, compiled.inputs, self.spec)
            store.scaler = asked.step.scaling
            self.spec = None if self.spec is None else self.spec.of_live(store.live)
            self._described_over = store
        if first:
            seed = torch.initial_seed() if asked.options.seed is None else asked.options.seed
            store.seed = world.from_rank_0(lambda: seed)
        return made if asked.step is None else made.with_adopted_optimizer(self.spec)

    def _load(self, compiled: PlainProgram, made: CompilationResult) -> Session:
        """`compiled` at work on this rank: what was made, at some sizes."""
        asked, world, store = self.asked, self.world, self.store
        assert store is not None
        coordinates = asked.mesh.coordinates(dist.get_rank())
        executor = Executor(compiled, world.groups, coordinates, world.device, world.board)
        make = partial(_specialise_backward, world.board, compiled, made)
        return Session(compiled, store, executor, made.tree, asked.options.debugging.cuda_graph, make, asked.options.debugging.check_inputs)


def _specialise_backward(
    board: FailureBoard | None, compiled: PlainProgram, made: CompilationResult, received: Collection[str]
) -> PlainProgram:
    """`compiled` with the backward for the outputs that received gradients."""
    shapes = {port.name: port.shape for port in compiled.inputs if port.kind == "input"}
    return instance.program_for_shapes(shared_compilation.for_outputs(board, made, received), shapes)
