"""Checked arguments of `meshc.compile`, immutable: the keys and requests of compilations are derived from them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshc.errors import PlanError, StateError
from meshc.frontend import admission, call_keys, dynamic_dims, exported, flex_on_cpu
from meshc.frontend.expert_bias import refuse_without_bias
from meshc.frontend.expert_placement import copies_per_rank, give_slots, slots_of
from meshc.frontend.gradient_hooks import Hooks, hooks_in
from meshc.frontend.libraries.stock_caches import LENGTH
from meshc.frontend.listed_experts import looped_expert_counts
from meshc.frontend.module_watch import ModuleState, ModuleWatch
from meshc.frontend.read_values import Values
from meshc.frontend.train_step import TracedFunction, TrainStep, traced_step
from meshc.ir import trees
from meshc.ir.forms import Forms
from meshc.ir.functions import Function
from meshc.ir.keys import is_a
from meshc.ir.mesh import DATA_ROLES, Mesh, role
from meshc.ir.paths import input_names
from meshc.lazy_module import LazyModule
from meshc.optimizer.optimizer import OptimizerSpec
from meshc.optimizer.optimizer_set import Optimizers
from meshc.options import Options, Training, refuse_others, refuse_with
from meshc.passes.phases.request import JoinedInputs, Request
from meshc.plan.recipes import PlanLike, resolve
from meshc.plan.split_axes import taken_apart
from meshc.program.program import BACKENDS, PlainProgram
from meshc.runtime.state.ownership import refuse_foreign_parameters
from meshc.runtime.state.store import Store

if TYPE_CHECKING:
    from meshc.frontend.libraries import padded_caches
else:
    padded_caches = LazyModule("meshc.frontend.libraries.padded_caches")

Arguments = tuple[tuple[object, ...], dict[str, object]]
"""A call's arguments: those by position, those by name."""
OptimizerKey: TypeAlias = tuple[tuple[str, Hashable], ...]
ContextKey: TypeAlias = tuple[call_keys.ModuleKey, OptimizerKey]


@dataclass(frozen=True, eq=False)
class CompilationKey:
    """What a compilation is kept under, hashed once: structure, shapes and dtypes of a call's inputs, what else of the module decides its
    program, the optimizer's flags and branches, and what stands where its trace has read Python (None: not known yet)."""

    inputs: call_keys.InputKey
    module: call_keys.ModuleKey
    optimizer: OptimizerKey
    values: Values | None = None
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.inputs, self.module, self.optimizer, self.values)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CompilationKey):
            return NotImplemented
        mine, theirs = ((one._hash, one.inputs, one.module, one.optimizer, one.values) for one in (self, other))
        return mine == theirs


@dataclass(eq=False)
class KnownCall:
    """What calls that look alike have in common, as long as module, modes and optimizer stay as they are: found at the first of them.

    base    the key of their compilation, but for the Python values that its program reads
    places  where their tensors stand among the leaves, in the order of the program's inputs
    sizes   of dims: their names, and how many there are, as ranks compare them; None: not asked for yet
    """

    base: CompilationKey
    places: tuple[int, ...] = ()
    sizes: tuple[tuple[str, ...], tuple[int, ...]] | None = None


KNOWN = {"inputs": ("global", "local"), "outputs": ("plain", "dtensor"), "backend": BACKENDS}


class CompileArguments:
    """The arguments of `meshc.compile` (which says what each means), checked. Raises PlanError or CaptureError."""

    def __init__(
        self,
        what: nn.Module | TrainStep | Function,
        mesh: Mesh | DeviceMesh,
        plan: PlanLike,
        inputs: str,
        outputs: str,
        backend: str,
        names: Mapping[str, Sequence[str | None]] | None,
        options: Options,
    ) -> None:
        for value, (name, known) in zip((inputs, outputs, backend), KNOWN.items(), strict=True):
            if value not in known:
                raise PlanError(f"{name}={value!r} is not known: use {' or '.join(map(repr, known))}")
        refuse_others(options)
        what = exported.prepare_export(what)
        self.what, self.mesh, self.inputs, self.outputs, self.backend = what, Mesh.of(mesh), inputs, outputs, backend
        self.names, self.options = names, options
        self.dynamic = dynamic_dims.parse_dynamic(options.dynamic)
        self.plan = resolve(plan, self.mesh)
        taken_apart(self.plan, self.mesh)  # refuses what cannot be, at once
        self.step = what if isinstance(what, TrainStep) else None
        admission.refuse_kind(what)
        self.traced = self._trace()
        self._watch, self.forms = ModuleWatch(self.module), Forms()
        self.found_batch: dict[str, int | None] = {}
        """Of inputs of which each rank has a part, along which dim these are joined, by the programs so far."""
        self.adds = False
        self.called: object = what
        """What runs the program when it is called: the model, or a module of it."""
        self.path = ""
        """Where that is in the model."""
        self.by_hand = False
        """Whether it is a module in the model that is called by somebody, not by the model's own generate."""
        self._exported = exported.is_module(self.module)
        adopted = Store.of(self.module) is not None
        if not adopted:
            refuse_foreign_parameters(self.module)
        admission.refuse_module(self.module, adopted)
        refused = getattr(self.traced.function, "refused", [])
        if refused:
            raise PlanError(f"{', '.join(refused)}: both model.forward and the loss take this name; rename it in one of them")
        refuse_with(options, self.step is not None, inputs)
        if options.experts.bias_update is not None:
            refuse_without_bias(self.module)
        if options.experts.placement is not None:
            self._make_movable()
        if inputs == "local" and not DATA_ROLES & {*map(role, self.mesh.names)}:
            raise PlanError(
                f'inputs="local" splits the batch along axes with a data role (dp, dp_shard): the mesh {self.mesh} has none\n'
                '  what to do: inputs="global", where every rank passes the whole batch; or a mesh with such an axis, of one rank or more: '
                '"dp=1,tp=2"'
            )

    def advice_on_attribute(self, name: str) -> str:
        """Text for an AttributeError on the program when its model has attribute `name`; "" otherwise."""
        if name.startswith("_") or not (self.step is not None or isinstance(self.what, nn.Module)) or not hasattr(self.module, name):
            return ""
        return (
            f"\n  why: the {type(self.module).__qualname__} that was compiled stays the live object, and has it; meshc.compile returns a "
            f"handle of its programs\n  what to do: keep both, program = meshc.compile(model, mesh, ...), and write model.{name}"
        )

    def _trace(self) -> TracedFunction:
        if self.step is not None:
            return traced_step(self.step)
        if isinstance(self.what, nn.Module):
            return TracedFunction(self.what, call_keys.call_module, self.what.forward)
        function = cast(Function, self.what)
        return TracedFunction(nn.Module(), lambda module, *args, **kwargs: function(*args, **kwargs), function)

    def _make_movable(self) -> None:
        """The model's experts say where they lie, unless they do already. Raises PlanError, StateError."""
        copies = self.options.experts.copies
        if Store.of(self.module) is None:
            give_slots(self.module, looped_expert_counts(self.module), prod(axis.size for axis in self.mesh.axes), copies)
            return
        movable = [module for module in self.module.modules() if slots_of(module) is not None]
        if not movable or copies_per_rank(movable[0]) != copies:
            has = f"with places for {copies_per_rank(movable[0])} copies on each rank" if movable else "whose experts stay where they are"
            said = f'Options(experts=Experts(placement="movable", copies={copies})): the model has a program already {has}\n'
            advice = "  what to do: give all programs of the model the same; the first to be compiled decides"
            raise StateError(self.options.as_written(said) + advice)

    def having(self, **changes: Any) -> CompileArguments:
        """A copy with other values of these fields."""
        found = copy.copy(self)
        vars(found).update(changes)
        return found

    def part(self, path: str, by_hand: bool = False) -> CompileArguments:
        """The same for calls of a module inside the model: programs of their own, over the model's parameters. by_hand: whether its user
        calls it; what the model's inputs are said to be is not of its own then."""
        inner = self.module.get_submodule(path)
        traced = TracedFunction(self.module, partial(call_keys.call_inside, path), inner.forward)
        found = self.having(path=path, by_hand=by_hand, called=inner, traced=traced, forms=Forms(), found_batch={})
        return found._for_other_inputs() if by_hand else found

    def with_whole_batch(self) -> CompileArguments:
        """A copy for calls that pass the whole batch on every rank, as the model's own generate does with gathered prompts."""
        found = self.of_model() if self.step is not None else self
        return found.having(inputs="global", forms=Forms(), options=found.options.having(uneven_rows=False))

    def _for_other_inputs(self) -> CompileArguments:
        """Drops the dynamic dims, and `names` of inputs that the function to trace does not take; in place. Returns self."""
        takes = self.traced.parameters
        self.names = {name: dims for name, dims in (self.names or {}).items() if takes is None or name in {one.name for one in takes}}
        self.options, self.dynamic = self.options.having(dynamic=None), dynamic_dims.parse_dynamic(None)
        return self

    def of_model(self) -> CompileArguments:
        """The same for calls of a training step's model: programs of their own, over its parameters. What the step says of its loss's
        inputs, of its updates and of its schedule is not of these."""
        model, options = self.module, self.options.having(schedule=None, training=Training(), expert_bias_update=None)
        traced = TracedFunction(model, call_keys.call_module, model.forward)
        return self.having(what=model, called=model, step=None, forms=Forms(), traced=traced, options=options)._for_other_inputs()

    @property
    def module(self) -> nn.Module:
        """The model; of a function an empty one."""
        return self.traced.module

    @property
    def name(self) -> str:
        whole = call_keys.name_of(self.what)
        return f"{self.path} of {whole}" if self.path else whole

    @property
    def data_ranks(self) -> int:
        """Number of parts of a batch, of which each rank passes one; 1 where all pass the whole."""
        return self.mesh.data_ranks if self.inputs == "local" else 1

    # ------------------------------------------------------------------------------------------------------------------- a call

    def by_name(self, given: Arguments) -> Arguments:
        """A call's arguments bound to the signature. Raises InputError."""
        flex_on_cpu.masks_as_inputs()
        admission.refuse_inputs(input_names(self.traced.signature, *given), *given)
        inputs = self.in_order(given)
        if self._exported:
            exported.refuse_other_inputs(self.module, self.named_leaves(self.whole_batch(inputs)))
        return inputs

    def named_leaves(self, inputs: Arguments) -> list[tuple[str, object]]:
        """The leaves of a call's arguments with their paths."""
        return list(zip(input_names(self.traced.signature, *inputs), trees.leaves(inputs), strict=True))

    def in_order(self, given: Arguments) -> Arguments:
        """Arguments by name where the signature names them; hooks see what is passed by position, and what by name."""
        inputs = call_keys.canonical_call(self.traced, *given)
        return given if call_keys.has_hooks(self.called) else inputs

    def tensor_places(self, given: Arguments, leaves: Sequence[object]) -> tuple[int, ...]:
        """Positions of the tensors among the leaves of a call, in the order of `by_name`."""
        numbers = itertools.count()
        order = cast(list[int], trees.leaves(self.in_order(trees.map_leaves(lambda _: next(numbers), given))))
        return tuple(at for at in order if isinstance(leaves[at], torch.Tensor))

    @property
    def state(self) -> ModuleState:
        """What of the module decides its program now; the same object as before, as long as the same modules and parameters are in it."""
        return self._watch.state()

    def context_key(self, state: ModuleState, spec: OptimizerSpec | None, optimizers: Optimizers | None) -> ContextKey:
        """What beside its inputs decides the compilation of a call: the module and the modes around it, and the optimizer."""
        optimizer = spec.key_of(optimizers) if spec and optimizers else ()
        return call_keys.module_key(state, self.step is not None or torch.is_grad_enabled()), optimizer

    def general_key(self, inputs: Arguments, key: CompilationKey) -> CompilationKey:
        """Key of the compilation for all sizes: dynamic dims are replaced by their names."""
        if not self.dynamic:
            return key
        names = input_names(self.traced.signature, *inputs)
        spec, leaves = key.inputs
        return replace(key, inputs=(spec, tuple(self.dynamic.key_with_names(name, leaf) for name, leaf in zip(names, leaves, strict=True))))

    def shapes(self, inputs: Arguments) -> list[tuple[str, tuple[int, ...]]]:
        """Path and shape of each tensor that a call passes."""
        return [(name, tuple(leaf.shape)) for name, leaf in self.named_leaves(inputs) if isinstance(leaf, torch.Tensor)]

    def whole_batch(self, inputs: Arguments) -> Arguments:
        """With inputs="local", examples are a rank's part; tracing sees the whole batch."""
        return inputs if self.inputs == "global" else self.with_rows(inputs, lambda rows: rows * self.data_ranks)

    def with_rows(self, inputs: Arguments, count: Callable[[int], int]) -> Arguments:
        """The inputs with `count(rows)` rows in place of `rows`, as shapes, where they have a batch dim."""
        leaves, spec = trees.flatten(inputs)
        found = []
        for leaf, dim in zip(leaves, self.batch_dims(inputs), strict=True):
            if dim is not None and isinstance(leaf, torch.Tensor):
                shape = [count(size) if d == dim else size for d, size in enumerate(leaf.shape)]
                leaf = torch.empty(shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)
            found.append(leaf)
        made: Arguments = trees.unflatten(found, spec)
        return made

    def batch_dims(self, inputs: Arguments) -> list[int | None]:
        """Of each leaf the dim along which ranks' parts are joined; None for what has no batch, as numbers have none. What `names=` says;
        what a compilation has found; before that the first."""
        return [self._batch_dim(name, leaf) for name, leaf in self.named_leaves(inputs)]

    def _batch_dim(self, name: str, leaf: object) -> int | None:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, DTensor) or leaf.dim() == 0:
            return None
        labels = list((self.names or {}).get(name, ()))
        if "batch" in labels or (labels and all(labels)):
            return labels.index("batch") if "batch" in labels[: leaf.dim()] else None
        found = self.found_batch.get(name, 0)
        return found if found is None or found < leaf.dim() else 0

    def joined_inputs(self, inputs: Arguments) -> JoinedInputs | None:
        """How the whole batch is concatenated from the ranks' parts, for tracing; None if ranks have no parts."""
        if self.data_ranks == 1:
            return None
        leaves = self.named_leaves(inputs)
        dims = {name: self._batch_dim(name, leaf) for name, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0}
        return JoinedInputs(dims, 0 if self.options.local_inputs.uneven_rows else self.data_ranks)

    def note_batch(self, program: PlainProgram) -> None:
        """Records the batch dims of a program's inputs, for later calls."""
        if self.inputs == "local":
            axes = {*self.mesh.data_axes}
            for port in program.inputs if axes else ():
                if port.kind == "input":
                    rows = () if port.sharding is None else port.sharding.parts()
                    self.found_batch[port.name] = next((dim for dim, _, part in rows if axes & {*part.axes}), None)

    # ---------------------------------------------------------------------------------------------------------------- a request

    def request(self, given: Arguments, spec: OptimizerSpec | None, store: Store | None, **changes: Any) -> Request:
        """What the passes are asked for. store: where the model's state lies already, by which later programs go. changes: fields."""
        step, (args, kwargs) = self.step, given
        grad = step is not None or (torch.is_grad_enabled() and self._takes_gradient(given))
        stored = [] if store is None else [held for key, held in store.held.items() if is_a(key, "parameter")]
        fixed = {held.name: held.sharding for held in stored}
        offloaded = frozenset(held.name for held in stored if held.storage != "device")
        hooks = {} if step is None else hooks_in(self.module)
        ask: dict[str, Any] = dict(
            module=self.module, function=self.function(kwargs), signature=self.traced.signature, args=args, kwargs=kwargs,
            mesh=self.mesh, plan=self.plan, grad=grad, train=step is not None, optimizer=spec,
            hooks=hooks, adds=self.adds, clip_grad_norm=step.clip_grad_norm if step else None,
            clip_grad_value=step.clip_grad_value if step else None,
            scales_loss=step is not None and step.scaling is not None, microbatches=self._microbatches(grad),
            batch_mix=step.batch_mix if step else "refuse", inputs=self.inputs, joined=self.joined_inputs(given),
            outputs=self.outputs, names=self.names, autocast=call_keys.autocast_state(), fixed=fixed, offloaded=offloaded,
            dynamic=self.dynamic, owners=store.places() if store is not None else {}, backend=self.backend,
            options=self.options.having(depth="whole") if self._by_name(hooks) else self.options,
            must_pass=self.options.sequence.attention in ("ring", "zigzag"),
        )  # fmt: skip
        return Request(**ask).having(**changes)

    def _by_name(self, hooks: Mapping[str, Hooks]) -> bool:
        """Whether something is said of single parameters that equal layers need not have in common."""
        return bool(hooks) or (self.step is not None and isinstance(self.step.clip_grad_norm, Mapping))

    def function(self, kwargs: Mapping[str, object]) -> Function:
        """What is traced; of a call with a cache the model as a function of the cache's buffers."""
        if LENGTH not in kwargs:
            return self.traced.function
        return partial(padded_caches.call_inside, self.path) if self.path else padded_caches.call

    def _microbatches(self, grad: bool) -> int | None:
        """Number of microbatches; None: the number predicted to be fastest, chosen for the pipeline."""
        step = self.step
        asked = step.microbatches if step is not None else None if grad else self.options.pipeline.microbatches
        if asked is not None:
            return asked
        if self.mesh.pipeline_axis is None or (grad and step is None) or self.dynamic:
            return 1
        return None if step is None or step.batch_mix == "refuse" else 1  # with a mean of parts another number is another meaning

    def _takes_gradient(self, inputs: Arguments) -> bool:
        tensors = (leaf for leaf in (*self.module.parameters(), *trees.leaves(inputs)) if isinstance(leaf, torch.Tensor))
        return any(tensor.requires_grad for tensor in tensors)
