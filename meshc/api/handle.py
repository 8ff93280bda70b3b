"""`meshc.compile` and what it returns. Only this file and the command line see both the passes and the runtime."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from meshc.api import saving
from meshc.api.options import Options, refuse_others
from meshc.cost import call
from meshc.errors import InputError, MeshcError, PlanError, StateError
from meshc.frontend import admission, calling, dynamic, side_effects
from meshc.frontend.train_step import Traced, traced_step
from meshc.ir.mesh import DATA_ROLES, Mesh, role
from meshc.ir.paths import input_names
from meshc.optimizer.optimizer import changes, describe, mark_stepped, numbers, rates
from meshc.passes.driver import hooks
from meshc.passes.driver.dump import dumper
from meshc.passes.driver.pipeline import compile_program, specialised
from meshc.passes.phases.draft import Draft, Request
from meshc.pipelining import draw
from meshc.pipelining.timing import Timeline
from meshc.plan.recipes import resolve
from meshc.program import instance
from meshc.program.program import Port
from meshc.program.program import Program as Compiled
from meshc.report import summary
from meshc.runtime.agreement import agreed
from meshc.runtime.agreement.compare import Disagreement, agree, from_rank_0, refusable, together
from meshc.runtime.comm.groups import Groups
from meshc.runtime.failure.board import FailureBoard, announce, listening
from meshc.runtime.failure.turn import Turn
from meshc.runtime.run.autograd import Call, ProgramFunction
from meshc.runtime.run.executor import Executor
from meshc.runtime.run.session import Session
from meshc.runtime.run.train_step import TrainStep
from meshc.runtime.simulator.passcheck import PassCheck
from meshc.runtime.state.ownership import calls_allowed, guard_calls
from meshc.runtime.state.store import Store
from meshc.text import show as text

DEFAULTS = Options()


def compile(
    what: nn.Module | TrainStep | Callable[..., Any],
    mesh: Any,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    plan: Any = "auto",
    inputs: str = "global",
    outputs: str = "plain",
    backend: str = "eager",
    names: Mapping[str, Sequence[str | None]] | None = None,
    options: Options = DEFAULTS,
) -> Program:
    """Compile a module, a TrainStep or a function for a mesh.

    mesh      a torch.distributed.DeviceMesh with axis names, or a `meshc.Mesh("dp=2,tp=4")`, which needs no process group
    args, kwargs  example inputs, as in torch.export; meta tensors will do. A module with trainable parameters needs them
    plan      "auto" (each axis's role), a recipe ("fsdp+megatron_sp"), or lines of the plan grammar (docs/plans.md)
    inputs    "global": the same whole tensors on every rank. "local": each rank's part of the batch
    outputs   "plain": whole tensors come back. "dtensor": they stay as they lie
    backend   "eager", or "inductor" for compiled regions between collectives
    names     names for dims of inputs: {"input_ids": ("batch", "seq")}

    Raises PlanError, CaptureError, CompileError or StateError, each saying what to change.
    """
    board = announce()
    if isinstance(mesh, Mesh) and mesh.device_mesh is None:
        board = None
    with together(board, "compile"):
        for name, value, known in (
            ("inputs", inputs, ("global", "local")),
            ("outputs", outputs, ("plain", "dtensor")),
            ("backend", backend, ("eager", "inductor")),
        ):
            if value not in known:
                raise PlanError(f"{name}={value!r} is not known: use {' or '.join(map(repr, known))}")
        admission.refuse_examples(args, kwargs)
        refuse_others(options)
        args, kwargs = tuple(args), dict(kwargs or {})
        program = Program(what, Mesh.of(mesh), plan, inputs, outputs, backend, names, options, board)
        if not args and not kwargs and program.step is None:
            calling.refuse_unknown_inputs(program.traced.module)
    if args or kwargs:
        program.prepare(args, kwargs)
    return program


class Program:
    """A compiled module, step or function. Called like the model.

    It holds one compilation per key (input structure, shapes, dtypes, training flags, requires_grad, grad mode, autocast); `compiled` is
    the one that ran last.
    """

    def __init__(
        self,
        what: nn.Module | TrainStep | Callable[..., Any],
        mesh: Mesh,
        plan: Any,
        inputs: str,
        outputs: str,
        backend: str,
        names: Mapping[str, Sequence[str | None]] | None,
        options: Options,
        board: FailureBoard | None = None,
    ) -> None:
        self._board, self._turn = board, Turn()
        self.what, self.mesh, self.inputs, self.outputs, self.backend = what, mesh, inputs, outputs, backend
        self.names, self.options = names, options
        self._dynamic = dynamic.read(options.dynamic)
        self.plan = resolve(plan, mesh)
        self.step = what if isinstance(what, TrainStep) else None
        admission.refuse_kind(what)
        self.traced = self._traced()
        admission.refuse_module(self.traced.module, Store.of(self.traced.module) is not None)
        self.spec = describe(self.step.optimizers) if self.step else None
        self.metrics: dict[str, Any] = {}
        self.timings: dict[str, float] = {}
        self._sessions: dict[Any, tuple[Session | None, Compiled, Draft]] = {}
        self._last: tuple[Session | None, Compiled, Draft] | None = None
        self._general: dict[Any, tuple[Compiled, Draft]] = {}
        self._store: Store | None = None
        self._groups: Groups | None = None
        self._world = dist.group.WORLD if dist.is_available() else None
        self._known: list[str] = []
        refused = getattr(self.traced.function, "refused", [])
        if refused:
            raise PlanError(f"{', '.join(refused)}: both model.forward and the loss take this name; rename it in one of them")
        if self.inputs == "local":
            self._check_local_batch()
        if mesh.device_mesh is not None:
            calling.refuse_other_world(mesh, dist.get_world_size())

    # ------------------------------------------------------------------------------------------------------------- compilation

    def _traced(self) -> Traced:
        if self.step is not None:
            return traced_step(self.step)
        if isinstance(self.what, nn.Module):
            return Traced(self.what, calling.call_module, self.what.forward)
        function: Callable[..., Any] = self.what  # type: ignore[assignment]
        return Traced(nn.Module(), lambda module, *args, **kwargs: function(*args, **kwargs), function)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile for these inputs. All ranks call it."""
        with self._guarded("compile"):
            self._prepare(*self._admit(args, kwargs))

    def _guarded(self, what: str) -> contextlib.AbstractContextManager[Any]:
        """A context for one thread, in which this rank's failure reaches the others, and theirs this one."""
        if self._board is None:
            return self._turn.taken(what)
        return self._board.guard(self._store.step if self._store else 0, what)

    def _check_local_batch(self) -> None:
        if not any(role(axis.name) in DATA_ROLES for axis in self.mesh.axes):
            raise PlanError(f'inputs="local" splits the batch along axes with a data role (dp, dp_shard): the mesh {self.mesh} has none')

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        optimizer = self.spec.key_of(self.step.optimizers) if self.spec and self.step else ()
        with torch.set_grad_enabled(self.step is not None or torch.is_grad_enabled()):
            return (calling.input_key(args, kwargs), calling.module_key(self.traced.module), optimizer)

    def _admit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """What a call passes, by name, and the key of its compilation; a part of another shape is refused."""
        with refusable(self._board):
            args, kwargs = calling.canonical(self.traced.signature, args, kwargs)
            if self._dynamic:
                self._dynamic.sizes(self._shapes(*self._global_examples((args, kwargs))))
            elif self.inputs == "local" and self._known:
                self._refuse_other_shapes(args, kwargs)
            return args, kwargs, self._key(args, kwargs)

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> tuple[Session | None, Compiled, Draft]:
        if key not in self._sessions:
            with self._guarded("compile"):
                self._agree_on_inputs(args, kwargs, key)
                self._sessions[key] = self._compile(args, kwargs, key)
                self._known.append(calling.describe_inputs(args, kwargs))
                if self._dynamic and len(self._sessions) > instance.KEPT:
                    del self._sessions[next(iter(self._sessions))], self._known[0]
        self._last = self._sessions[key] = self._sessions.pop(key)  # the one that was used last is dropped last
        return self._last

    def _shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
        """Path and shape of each tensor that a call passes."""
        names = input_names(self.traced.signature, args, kwargs)
        leaves = zip(names, pytree.tree_leaves((args, kwargs)), strict=True)
        return [(name, tuple(leaf.shape)) for name, leaf in leaves if isinstance(leaf, torch.Tensor)]

    def _general_key(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> Any:
        """The key of what serves all sizes: dynamic dims go by name."""
        if not self._dynamic:
            return key
        names = input_names(self.traced.signature, args, kwargs)
        (spec, leaves), *rest = key
        return (spec, tuple(self._dynamic.named(name, leaf) for name, leaf in zip(names, leaves, strict=True)), *rest)

    def _agree_on_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> None:
        """Before a compilation: that every rank is about to make it, for the same inputs and the same model."""
        if self._board is not None:
            mine = agreed.before_compiling(self, args, kwargs, key)
            agree(self._board, "compile", mine, agreed.advice, ahead=agreed.INPUTS, error=self._refusal)

    def _refusal(self, difference: Disagreement) -> MeshcError:
        if difference.field != agreed.INPUTS:
            return StateError(str(difference))
        if difference.alone:
            text = f"this rank passed {difference.mine}; rank {difference.other} passed what the program takes, {' or '.join(self._known)}"
        else:
            text = f"this rank passed {difference.mine}; rank {difference.other} passed {difference.theirs}"
        if self.inputs == "local":
            return InputError(calling.unequal_parts(text))
        return InputError(
            f'inputs="global" takes the same inputs on every rank: {text}\n'
            '  what to do: pass the whole batch everywhere, or compile with inputs="local" if each rank has its own part'
        )

    def _request(self, args: tuple[Any, ...], kwargs: dict[str, Any], **changes: Any) -> Request:
        grad = self.step is not None or (torch.is_grad_enabled() and self._takes_gradient(args, kwargs))
        step = self.step
        fixed = {}
        store = self._store or Store.of(self.traced.module)
        if store is not None:
            fixed = {held.name: held.sharding for key, held in store.held.items() if key.startswith("parameter:")}
        ask: dict[str, Any] = dict(
            module=self.traced.module, function=self.traced.function, signature=self.traced.signature, args=args, kwargs=kwargs,
            mesh=self.mesh, plan=self.plan, grad=grad, train=step is not None, optimizer=self.spec,
            clip_grad_norm=step.clip_grad_norm if step else None, microbatches=self._microbatches(grad),
            batch_mix=step.batch_mix if step else "refuse", inputs=self.inputs, outputs=self.outputs, names=self.names,
            autocast=calling.autocast_state(), fixed=fixed, dynamic=self._dynamic, schedule=self.options.schedule,
            pp_splits=tuple(self.options.pp_splits or ()), memory_budget=self.options.memory_budget,
            owners=store.places() if store is not None else {}, check_indices=self.options.check_indices,
        )  # fmt: skip
        return Request(**{**ask, **changes})

    def _microbatches(self, grad: bool) -> int | None:
        """None: as many as are predicted to be fastest, which a pipeline alone can tell."""
        step = self.step
        asked = step.microbatches if step is not None else None if grad else self.options.microbatches
        if asked is not None:
            return asked
        if self.mesh.pipeline_axis is None or (grad and step is None) or self._dynamic:
            return 1
        return None if step is None or step.batch_mix == "refuse" else 1  # with a mean of parts another number is another meaning

    def _takes_gradient(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        leaves = pytree.tree_leaves((args, kwargs))
        return any(p.requires_grad for p in self.traced.module.parameters()) or any(
            isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves
        )

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> tuple[Session | None, Compiled, Draft]:
        if self._sessions and self.spec is not None and self.step is not None:
            old = next(reversed(self._sessions))[2]
            lines = changes(old, key[2])
            if lines:
                warnings.warn("meshc compiles again, because of the optimizer: " + "; ".join(lines), stacklevel=4)
                self.spec = describe(self.step.optimizers)
        examples = self._global_examples((args, kwargs))
        general = self._general_key(args, kwargs, key)
        if general not in self._general:
            self._general[general] = self._compile_general(*examples)
        compiled, draft = self._general[general]
        with refusable(self._board):
            own = instance.fitting(compiled, dict(self._shapes(*examples)))
        if self.mesh.device_mesh is None:
            return None, own, draft
        return self._load(own, compiled, draft), own, draft

    def _compile_general(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Compiled, Draft]:
        request = self._request(args, kwargs)
        hook = hooks.hook(self, PassCheck())
        with refusable(self._board), calls_allowed(self.traced.module), torch.set_grad_enabled(request.grad):
            if request.grad and self.step is None:
                calling.refuse_partial_storage(self.plan)
                calling.refuse_stages(self.mesh)
            compiled, draft = compile_program(request, listening(self._board, hook))
        for note in compiled.notes:
            if any(words in note for words in ("has no rule", "nothing but padding", "does the whole work", side_effects.LEFT_OUT)):
                warnings.warn(note, stacklevel=4)
        self.timings = dict(draft.seconds)
        return compiled, draft

    def _global_examples(self, inputs: Any) -> Any:
        """With inputs="local", examples are a rank's part; tracing sees the whole batch."""
        if self.inputs == "global":
            return inputs
        count = 1
        for axis in self.mesh.axes:
            if role(axis.name) in DATA_ROLES:
                count *= axis.size

        def whole(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or isinstance(leaf, DTensor) or leaf.dim() == 0:
                return leaf
            return torch.empty((leaf.shape[0] * count, *leaf.shape[1:]), dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)

        return pytree.tree_map(whole, inputs)

    def _load(self, compiled: Compiled, general: Compiled, draft: Draft) -> Session:
        """`compiled` at work on this rank; `general` is what serves all sizes, if some are dynamic."""
        device_mesh = self.mesh.device_mesh
        assert device_mesh is not None
        on_cuda = self.mesh.device_type == "cuda"
        device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
        if self._board is not None:
            same = {agreed.COMPILED: text.hash_program(compiled)}
            agree(self._board, "compile", same, agreed.advice, behind=partial(agreed.behind, compiled, self.traced.module))
        if self._groups is None:  # once all have come as far: making groups waits for them, and nothing wakes who waits there
            self._groups = Groups({axis.name: axis.size for axis in self.mesh.axes}, dist.get_rank(), dist.get_world_size(), device_mesh)
        first = Store.of(self.traced.module) is None
        owners = compiled.pipeline.owners if compiled.pipeline is not None else {}
        self._store = Store.adopt(self.traced.module, compiled.inputs, self.mesh, device, self._groups, owners)
        if isinstance(self.what, nn.Module) or self.step is not None:
            guard_calls(self.traced.module)
        if self.step is not None:
            self._store.adopt_optimizer(self.step.optimizers, compiled.inputs, self.spec)
            self.spec = None if self.spec is None else self.spec.of_live(self._store.live)
            draft.request = replace(draft.request, optimizer=self.spec)
        if first:
            seed = torch.initial_seed() if self.options.seed is None else self.options.seed
            self._store.seed = from_rank_0(self._board, lambda: seed)
        executor = Executor(compiled, self._groups, self.mesh.coordinates(dist.get_rank()), device, self._board, self.backend)
        make = partial(self._specialised, compiled, general, draft)
        return Session(compiled, self._store, executor, draft.output_tree, self.options.cuda_graph, make, self.options.check_inputs)

    def _specialised(self, compiled: Compiled, general: Compiled, draft: Draft, received: Collection[str]) -> Compiled:
        """`compiled` with the backward for the outputs that received gradients."""
        shapes = {port.name: port.shape for port in compiled.inputs if port.kind == "input"}
        return instance.fitting(specialised(general, draft, received), shapes)

    # ------------------------------------------------------------------------------------------------------------------ calling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the program like the model. Raises InputError for inputs that do not fit, PeerError if another rank failed."""
        if self.mesh.device_mesh is None:
            raise StateError(
                f'this program was compiled for meshc.Mesh("{self.mesh}") without a process group: look at it, verify it, save it.\n'
                "  what to do: save it and start `torchrun ... -m meshc run PATH`, or compile with a DeviceMesh under torchrun"
            )
        if dist.group.WORLD is not self._world:
            raise StateError(
                "the process group that this program was compiled under has been destroyed, and its groups with it\n"
                "  what to do: call it before torch.distributed.destroy_process_group(), or compile again under the new group"
            )
        with self._guarded("call"):
            return self._call(args, kwargs)

    def __reduce__(self) -> Any:
        raise StateError(
            "a program lives in its process, with its groups and its part of the parameters, and is neither pickled nor copied\n"
            "  what to do: program.save(path) for `meshc run`; program.state_dict() or torch.distributed.checkpoint for its state"
        )

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs, key = self._admit(args, kwargs)
        session, _, _ = self._prepare(args, kwargs, key)
        assert session is not None
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        with refusable(self._board):
            session.check(tensors)
        if self._board is not None:
            self._board.begin(calling.name_of(self.what))  # from here on this rank sends: one that refuses this call sees that it is alone
        session.compare_inputs(tensors)
        if self.step is not None:
            return self._train(session, tensors)
        if session.backwards is not None:
            result = self._differentiable(session, tensors)
        else:
            result = session.outputs(session.run(tensors, {}))
        session.store.step += 1
        return result

    def _refuse_other_shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """With inputs="local", a part of another shape would stop the other ranks: it is refused, before anything is sent."""
        mine = calling.describe_inputs(args, kwargs)
        if mine not in self._known:
            raise InputError(calling.unequal_parts(f"this rank passed {mine}; the program takes {' or '.join(self._known)}"))

    def _train(self, session: Session, tensors: list[torch.Tensor]) -> torch.Tensor:
        assert self.step is not None
        values = {f"{index}.{name}": value for index, row in enumerate(numbers(self.step.optimizers)) for name, value in row.items()}
        env = session.run(tensors, values)
        session.store.step += 1
        mark_stepped(self.step.optimizers)
        loss: torch.Tensor = session.output(session.results[0], env[session.results[0].key])
        self.metrics = {
            "loss": loss,
            **session.metrics(env),
            "lr": rates(self.step.optimizers),
        }
        return loss

    def _differentiable(self, session: Session, tensors: list[torch.Tensor]) -> Any:
        store = session.store
        parameters = [port for port in session.program.inputs if port.kind == "parameter" and port.requires_grad]
        live = [store.held[store._alias.get(port.key, port.key)].live for port in parameters]
        wanting = [(port, tensor) for port, tensor in zip(session.inputs, tensors, strict=True) if tensor.requires_grad]
        call = Call(session, parameters, [port for port, _ in wanting], self._scales(session))
        leaves = ProgramFunction.apply(call, tensors, *live, *[tensor for _, tensor in wanting])
        return session.structured(leaves)

    def _scales(self, session: Session) -> dict[str, float | None]:
        if self.inputs != "local":
            return {}
        count = 1
        for axis in self.mesh.axes:
            if role(axis.name) in DATA_ROLES:
                count *= axis.size
        scale = {"mean": 1.0 / count, "sum": 1.0, None: None}[self.options.local_loss]
        return {port.name: scale for port in session.results if _split(port)}

    # ------------------------------------------------------------------------------------------------------------------ looking

    @property
    def compiled(self) -> Compiled:
        """The compiled program that ran last."""
        if self._last is None:
            raise StateError("nothing is compiled yet: call the program, or give example inputs to meshc.compile")
        return self._last[1]

    @property
    def general(self) -> Compiled:
        """The compiled program that serves all dynamic sizes; without any, that is `compiled`."""
        compiled = self.compiled
        return next((one for one, draft in self._general.values() if draft is self.draft), compiled)

    @property
    def draft(self) -> Draft:
        if self._last is None:
            raise StateError("nothing is compiled yet: call the program, or give example inputs to meshc.compile")
        return self._last[2]

    def __str__(self) -> str:
        return text.print_program(self.general)

    def summary(self) -> str:
        """Tables: parameters with placements and bytes per rank; stages; collectives by kind, axis, count and bytes; memory; time."""
        return summary.summary(self.compiled)

    def timeline(self, path: str | Path | None = None) -> Timeline:
        """What a call is predicted to look like: when each rank of the pipeline runs which stage on which microbatch, and what it sends.

        path  a folder, for `timeline.svg` and `timeline.json` (a trace that ui.perfetto.dev shows); or one file, .svg or .json

        The timeline has `events`, `makespan_s`, `bubble` and more. Without a pipeline it has one row, since all ranks do the same.
        MESHC_TRACE writes the same of a real run (docs/pipelines.md). Raises PlanError for a path of another kind.
        """
        line = call.predicted(self.compiled)
        if path is not None:
            draw.write(line, path)
        return line

    def factors(self) -> str:
        """What a plan can name: names, sizes, members."""
        return summary.factors(self.draft.names, self.draft.factors, self.compiled)

    def dump(self, path: str | Path) -> None:
        """Write the program's text after every pass, numbered, into a folder."""
        with calls_allowed(self.traced.module):
            compile_program(self.draft.request, dumper(path))

    def save(self, path: str | Path, weights: bool = True) -> None:
        """Write the artifact: a folder of texts, JSON and (without a process group, or on rank 0) weights."""
        with together(self._board, "save"):
            saving.save(self, path, weights, partial(from_rank_0, self._board))

    # -------------------------------------------------------------------------------------------------------------------- state

    @property
    def store(self) -> Store:
        if self._store is None:
            raise StateError("this program has no state yet: it needs a process group, and a first call or example inputs")
        return self._store

    def state_dict(self, full: bool = False) -> dict[str, Any]:
        """Model and optimizer by name, seed and step, as DTensors; with `full`, whole CPU tensors on rank 0."""
        with together(self._board, "state_dict"):
            return self.store.state_dict(full)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with together(self._board, "load_state_dict"):
            self.store.load_state_dict(state)

    def init_weights(self, fn: Callable[[nn.Module], Any]) -> None:
        """Fill a model that was built on `meta`."""
        with together(self._board, "init_weights"):
            self.store.init_weights(fn)

    def sync(self) -> None:
        """Bring the live parameters up to date where they do not share memory with the program."""
        with together(self._board, "sync"):
            self.store.sync()


def _split(port: Port) -> bool:
    return port.sharding is not None and bool(port.sharding.split_axes())
