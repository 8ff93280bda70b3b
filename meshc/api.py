"""`meshc.compile` and what it returns. Only this file and the command line see both the passes and the runtime."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from meshc import artifact, calling, environment, summary, text
from meshc.calling import TrainStep, Traced
from meshc.errors import InputError, PlanError, StateError, VerifyError
from meshc.mesh import DATA_ROLES, Mesh, role
from meshc.optimizer import changes, describe, mark_stepped, numbers
from meshc.options import Options
from meshc.passes.draft import Draft, Request
from meshc.passes.pipeline import compile_program
from meshc.program import Port
from meshc.program import Program as Compiled
from meshc.recipes import resolve
from meshc.runtime.autograd import Call, ProgramFunction
from meshc.runtime.executor import Executor
from meshc.runtime.failure import world_board
from meshc.runtime.groups import Groups
from meshc.runtime.passcheck import PassCheck
from meshc.runtime.session import Session
from meshc.runtime.store import Store
from meshc.runtime import verify as verification

_THIS = os.path.dirname(__file__)


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
    options: Options = Options(),
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
    for name, value, known in (
        ("inputs", inputs, ("global", "local")),
        ("outputs", outputs, ("plain", "dtensor")),
        ("backend", backend, ("eager", "inductor")),
    ):
        if value not in known:
            raise PlanError(f"{name}={value!r} is not known: use {' or '.join(map(repr, known))}")
    return Program(what, Mesh.of(mesh), tuple(args), dict(kwargs or {}), plan, inputs, outputs, backend, names, options)


class Program:
    """A compiled module, step or function. Called like the model.

    It holds one compilation per key (input structure, shapes, dtypes, training flags, requires_grad, grad mode, autocast); `compiled` is the
    one that ran last.
    """

    def __init__(
        self,
        what: nn.Module | TrainStep | Callable[..., Any],
        mesh: Mesh,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        plan: Any,
        inputs: str,
        outputs: str,
        backend: str,
        names: Mapping[str, Sequence[str | None]] | None,
        options: Options,
    ) -> None:
        self.what, self.mesh, self.inputs, self.outputs, self.backend = what, mesh, inputs, outputs, backend
        self.names, self.options = names, options
        self.plan = resolve(plan, mesh)
        self.step = what if isinstance(what, TrainStep) else None
        self.traced = self._traced()
        self.spec = describe(self.step.optimizer) if self.step else None
        self.metrics: dict[str, Any] = {}
        self.timings: dict[str, float] = {}
        self._sessions: dict[Any, tuple[Session | None, Compiled, Draft]] = {}
        self._last: tuple[Session | None, Compiled, Draft] | None = None
        self._store: Store | None = None
        self._groups: Groups | None = None
        self._pristine: dict[str, torch.Tensor] = {}
        self._hooked = False
        refused = getattr(self.traced.function, "refused", [])
        if refused:
            raise PlanError(f"{', '.join(refused)}: both model.forward and the loss take this name; rename it in one of them")
        trainable = any(p.requires_grad for p in self.traced.module.parameters())
        if args or kwargs:
            if self.inputs == "local":
                self._check_local_batch()
            self._prepare(args, kwargs)
        elif trainable and self.step is None and torch.is_grad_enabled():
            raise StateError(
                "this module has trainable parameters, which compile replaces, so it must know the inputs now.\n"
                "  what to do: meshc.compile(model, mesh, kwargs={...example inputs...}); meta tensors will do.\n"
                "  for inference: compile under torch.no_grad()"
            )

    # ------------------------------------------------------------------------------------------------------------- compilation

    def _traced(self) -> Traced:
        if self.step is not None:
            return calling.traced_step(self.step)
        if isinstance(self.what, nn.Module):
            return Traced(self.what, calling.call_module, self.what.forward)
        function: Callable[..., Any] = self.what  # type: ignore[assignment]
        return Traced(nn.Module(), lambda module, *args, **kwargs: function(*args, **kwargs), function)

    def _check_local_batch(self) -> None:
        if not any(role(axis.name) in DATA_ROLES for axis in self.mesh.axes):
            raise PlanError(f'inputs="local" splits the batch along axes with a data role (dp, dp_shard, ...); the mesh {self.mesh} has none')

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        optimizer = self.spec.key_of(self.step.optimizer) if self.spec and self.step else ()
        return (calling.input_key(args, kwargs), calling.module_key(self.traced.module), optimizer)

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Session | None, Compiled, Draft]:
        args, kwargs = calling.canonical(self.traced.signature, args, kwargs)
        key = self._key(args, kwargs)
        if key not in self._sessions:
            self._sessions[key] = self._compile(args, kwargs, key)
        self._last = self._sessions[key]
        return self._last

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
            clip_grad_norm=step.clip_grad_norm if step else None, microbatches=(step.microbatches or 1) if step else 1,
            batch_mix=step.batch_mix if step else "refuse", inputs=self.inputs, outputs=self.outputs, names=self.names,
            autocast=calling.autocast_state(), fixed=fixed,
        )  # fmt: skip
        return Request(**{**ask, **changes})

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
                self.spec = describe(self.step.optimizer)
        live = self.mesh.device_mesh is not None
        globals_ = self._global_examples((args, kwargs))
        hook = environment.hook(self, PassCheck())
        compiled, draft = compile_program(self._request(*globals_), hook)
        for note in compiled.notes:
            if "has no rule" in note:
                warnings.warn(note, stacklevel=4)
        self.timings = dict(draft.seconds)
        if not live:
            return None, compiled, draft
        return self._load(compiled, draft), compiled, draft

    def _global_examples(self, inputs: Any) -> Any:
        """With inputs="local", examples are a rank's part; tracing sees the whole batch."""
        if self.inputs == "global":
            return inputs
        count = 1
        for axis in self.mesh.axes:
            if role(axis.name) in DATA_ROLES:
                count *= axis.size

        def whole(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
                return leaf
            return torch.empty((leaf.shape[0] * count, *leaf.shape[1:]), dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)

        return pytree.tree_map(whole, inputs)

    def _load(self, compiled: Compiled, draft: Draft) -> Session:
        device_mesh = self.mesh.device_mesh
        assert device_mesh is not None
        device = torch.device(self.mesh.device_type, torch.cuda.current_device()) if self.mesh.device_type == "cuda" else torch.device("cpu")
        if self._groups is None:
            self._groups = Groups({axis.name: axis.size for axis in self.mesh.axes}, dist.get_rank(), dist.get_world_size(), device_mesh)
        board = world_board() if dist.get_world_size() > 1 else None
        compare_programs(text.hash_program(compiled), device)
        first = self._store is None
        self._store = Store.adopt(self.traced.module, compiled.inputs, self.mesh, device, self._groups)
        if first and not self._hooked:
            self._guard_module()
        if self.step is not None:
            self._store.adopt_optimizer(self.step.optimizer, compiled.inputs, self.spec)
        if first:
            self._store.seed = self._seed(device)
        executor = Executor(compiled, self._groups, self.mesh.coordinates(dist.get_rank()), device, board, self.backend)
        return Session(compiled, self._store, executor, draft.out_spec)

    def _guard_module(self) -> None:
        """Calling the compiled module itself raises; the program's own tracing passes."""
        self._hooked = True
        module = self.traced.module

        def refuse(*_: Any) -> None:
            raise StateError("this module is compiled: call the program that meshc.compile returned, not the module")

        module._meshc_guard = module.register_forward_pre_hook(refuse) if False else None  # type: ignore[assignment]

    def _seed(self, device: torch.device) -> int:
        seed = torch.initial_seed() if self.options.seed is None else self.options.seed
        box = [seed]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(box, 0)
        return box[0]

    # ------------------------------------------------------------------------------------------------------------------ calling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the program like the model. Raises InputError for inputs that do not fit, PeerError if another rank failed."""
        if self.mesh.device_mesh is None:
            raise StateError(
                f'this program was compiled for meshc.Mesh("{self.mesh}") without a process group: it can be looked at, verified and saved.\n'
                "  what to do: save it and start `torchrun ... -m meshc run PATH`, or compile with a DeviceMesh under torchrun"
            )
        board = world_board() if dist.get_world_size() > 1 else None
        if board is None:
            return self._call(args, kwargs)
        with board.guard(self._store.step if self._store else 0, "call"):
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._last is not None:
            self._refuse_other_shapes(args, kwargs)
        session, compiled, _ = self._prepare(args, kwargs)
        assert session is not None
        args, kwargs = calling.canonical(self.traced.signature, args, kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        session.check(tensors)
        session.compare_inputs(tensors)
        if self.step is not None:
            return self._train(session, tensors)
        if compiled.mode == "autograd" and "backward" in compiled.stages:
            result = self._differentiable(session, tensors)
        else:
            result = session.outputs(session.run(tensors, {}))
        session.store.step += 1
        return result

    def _refuse_other_shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """With inputs="local", a part of another shape on one rank would compile there and hang: it is refused."""
        if self.inputs != "local":
            return
        args, kwargs = calling.canonical(self.traced.signature, args, kwargs)
        known = [key[0] for key in self._sessions]
        if calling.input_key(args, kwargs) in known:
            return
        have = [leaf[1:3] for leaf in known[0][1] if leaf[0] == "tensor"]
        mine = [leaf[1:3] for leaf in calling.input_key(args, kwargs)[1] if leaf[0] == "tensor"]
        raise InputError(
            f"all parts of a local batch have one shape: the program takes {[list(s) for s, _ in have]}, this rank passed "
            f"{[list(s) for s, _ in mine]}.\n  what to do: drop_last=True in the data loader, or pad the last batch and ignore its labels"
        )

    def _train(self, session: Session, tensors: list[torch.Tensor]) -> torch.Tensor:
        assert self.step is not None
        values = {f"{index}.{name}": value for index, row in enumerate(numbers(self.step.optimizer)) for name, value in row.items()}
        env = session.run(tensors, values)
        session.store.step += 1
        mark_stepped(self.step.optimizer)
        loss: torch.Tensor = session.output(session.results[0], env[session.results[0].key])
        self.metrics = {
            "loss": loss,
            "grad_norm": env.get("metric:grad_norm"),
            "lr": [float(group["lr"]) for group in self.step.optimizer.param_groups],
        }
        return loss

    def _differentiable(self, session: Session, tensors: list[torch.Tensor]) -> Any:
        store = session.store
        parameters = [port for port in session.program.inputs if port.kind == "parameter" and port.requires_grad]
        live = [store.held[store._alias.get(port.key, port.key)].live for port in parameters]
        wanting = [(port, tensor) for port, tensor in zip(session.inputs, tensors, strict=True) if tensor.requires_grad]
        call = Call(session, parameters, [port for port, _ in wanting], self._scales(session))
        leaves = ProgramFunction.apply(call, tensors, *live, *[tensor for _, tensor in wanting])
        return pytree.tree_unflatten(list(leaves), session.out_spec)

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
    def draft(self) -> Draft:
        if self._last is None:
            raise StateError("nothing is compiled yet: call the program, or give example inputs to meshc.compile")
        return self._last[2]

    def __str__(self) -> str:
        return text.print_program(self.compiled)

    def summary(self) -> str:
        """Tables: parameters with placements and bytes per rank; collectives by kind, axis, count and bytes; memory."""
        return summary.summary(self.compiled)

    def factors(self) -> str:
        """What a plan can name: names, sizes, members."""
        return summary.factors(self.draft.names, self.draft.factors, self.compiled)

    def dump(self, path: str | Path) -> None:
        """Write the program's text after every pass, numbered, into a folder."""
        args, kwargs = self.draft.request.args, self.draft.request.kwargs
        compile_program(self._request(args, dict(kwargs)), environment.dumper(path))

    def save(self, path: str | Path, weights: bool = True) -> None:
        """Write the artifact: a folder of texts, JSON and (without a process group, or on rank 0) weights."""
        live = self._store is not None and dist.is_initialized()
        tensors: dict[str, torch.Tensor] | None = None
        if weights:
            if live:
                assert self._store is not None
                state = self._store.state_dict(full=True)
                tensors = dict(state.get("model", {}))
            else:
                tensors = {name: value for name, value in self.traced.module.state_dict(keep_vars=False).items() if not value.is_meta}
                tensors.update({n: b for n, b in self.traced.module.named_buffers() if not b.is_meta})
        if not live or dist.get_rank() == 0:
            artifact.save(self.compiled, path, tensors)
        if live and dist.get_world_size() > 1:
            dist.barrier()

    # -------------------------------------------------------------------------------------------------------------------- state

    @property
    def store(self) -> Store:
        if self._store is None:
            raise StateError("this program has no state yet: it needs a process group, and a first call or example inputs")
        return self._store

    def state_dict(self, full: bool = False) -> dict[str, Any]:
        """Model and optimizer by name, seed and step, as DTensors; with `full`, whole CPU tensors on rank 0."""
        return self.store.state_dict(full)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.store.load_state_dict(state)

    def init_weights(self, fn: Callable[[nn.Module], Any]) -> None:
        """Fill a model that was built on `meta`."""
        self.store.init_weights(fn)

    def sync(self) -> None:
        """Bring the live parameters up to date where they do not share memory with the program."""
        self.store.sync()


def _split(port: Port) -> bool:
    return port.sharding is not None and bool(port.sharding.split_axes())


def compare_programs(digest: str, device: torch.device) -> None:
    """Raises StateError on all ranks unless every rank compiled the same program."""
    if dist.get_world_size() == 1:
        return
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    if len(set(digests)) > 1:
        rank = next(r for r, value in enumerate(digests) if value != digests[0])
        raise StateError(
            f"ranks 0 and {rank} compiled different programs: the model, the plan, the inputs' shapes or the options differ between them"
        )


def verify(program: Program, inputs: Any = None, dtype: torch.dtype | None = None) -> verification.Report:
    """Simulate all ranks in this process and compare with the model itself on one device.

    inputs   keyword inputs of one call (a mapping), or positional ones (a sequence); default: random ones of the compiled shapes
    dtype    torch.float64 captures a float64 copy under the same plan and checks updated parameters too

    Under a process group every rank calls it; weights are gathered and rank 0 computes (the others get an empty Report). Raises VerifyError
    that names the first value that is wrong.
    """
    module = program.traced.module
    values = None
    if program._store is not None:
        values = program._store.state_dict(full=True).get("model")
        if dist.get_rank() != 0:
            return verification.Report(0.0)
    double = dtype == torch.float64
    if dtype not in (None, torch.float32, torch.float64):
        raise InputError(f"verify(dtype={dtype}): use torch.float64, or leave it out")
    ask = program.draft.request
    args, kwargs = _call_inputs(inputs, ask.args, dict(ask.kwargs), program)
    twin = verification.plain_copy(module, values, double)
    args, kwargs = verification.widen_inputs((args, kwargs), double)
    reference = verification.Reference(twin, program.traced.function, args, kwargs, program._store.seed if program._store else 0, double)
    floats = [p.dtype for p in twin.parameters()] or [torch.float32]
    low = [d for d in (torch.bfloat16, torch.float16) if d in floats or any(d == region[1] for region in ask.autocast)]
    report = verification.Report(verification.TOLERANCE[low[0]] if low else verification.TOLERANCE[torch.float64 if double else torch.float32])
    mesh = Mesh.from_axes(program.mesh.axes, device="cpu", ranks=program.mesh.ranks)
    base = dict(module=twin, args=args, kwargs=kwargs, mesh=mesh, double=double, fixed={}, inputs="global", outputs="plain")
    if program.step is not None:
        plain, draft = compile_program(program._request(**{**base, "optimizer": None}))
        verification.compare_gradients(plain, reference, report)
        _raise_if_wrong(report, plain, draft, reference)
        _verify_update(program, base, twin, reference, report, double)
    else:
        plain, draft = compile_program(program._request(**{**base, "grad": ask.grad}))
        verification.compare_module(plain, reference, report)
        _raise_if_wrong(report, plain, draft, reference)
    if not report.ok:
        raise VerifyError(f"the program does not mean what the model means:\n{report}")
    return report


def _raise_if_wrong(report: verification.Report, compiled: Compiled, draft: Draft, reference: verification.Reference) -> None:
    if report.ok:
        return
    values = verification.input_values(compiled, reference, 0)
    values.update({p.key: torch.ones(p.shape, dtype=p.dtype) for p in compiled.inputs if p.kind == "tangent"})
    first = verification.first_wrong(compiled, draft.the_graph(), values, report.tolerance * 10)
    raise VerifyError(f"the program does not mean what the model means; the first wrong value is {first or 'not found'}\n{report}")


def _verify_update(
    program: Program, base: dict[str, Any], twin: nn.Module, reference: verification.Reference, report: verification.Report, double: bool
) -> None:
    """Some steps with a copy of the user's optimizer."""
    assert program.step is not None
    names = {id(p): name for name, p in program.traced.module.named_parameters()}
    mine = dict(twin.named_parameters())
    original = program.step.optimizer
    groups = [{**group, "params": [mine[names[id(p)]] for p in group["params"]]} for group in original.param_groups]
    optimizer = type(original)(groups)  # type: ignore[call-arg, arg-type]
    spec = describe(optimizer)
    compiled, _ = compile_program(program._request(**{**base, "optimizer": spec}))
    slots = {f"{name}/{slot.name}": slot for name, p in mine.items() if any(p is q for g in spec.groups for q in g.params) for slot in spec.slots_of(p)}

    def state(port: Port) -> torch.Tensor:
        return slots[port.name].initial(mine[port.of].detach())

    verification.compare_steps(
        compiled, reference, optimizer, state, lambda: numbers(optimizer), program.step.clip_grad_norm, report, parameters=double
    )


def _call_inputs(inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any], program: Program) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if inputs is not None:
        given = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
        return calling.canonical(program.traced.signature, *given)
    generator = torch.Generator().manual_seed(0)

    def random(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_meta:
            return leaf
        if leaf.is_floating_point():
            return torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype).requires_grad_(leaf.requires_grad)
        return torch.randint(0, 2, tuple(leaf.shape), generator=generator, dtype=torch.int64).to(leaf.dtype)

    return pytree.tree_map(random, (args, kwargs))
