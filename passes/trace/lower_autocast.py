"""Autocast: regions of automatic mixed precision, as explicit casts.

    enter = _enter_autocast('cuda', bf16, True, None)
    h = linear(x, w, b)                                    h = linear(x.to(bf16), w.to(bf16), b.to(bf16))
    y = layer_norm(h, (8,), g)            becomes          y = layer_norm(h.to(f32), (8,), g)
    z = multi_head_attention_forward(y, ...)               z = its ATen calls, each with its casts
    _exit_autocast(enter)

Torch casts by dispatch key: above autograd, at the outermost ATen operator that is on the device's list. So each call of a region is run on
fake tensors under a mode that sees ATen calls at the same level (below autograd, composites off the list decomposed) and records them
and their casts. If the call, given cast operands and no autocast, makes the same ATen calls on the same dtypes, the casts go in front of
it; else the recorded ATen calls take its place. The lists are data (`meshc.frontend.autocast_policy`), so the machine that
compiles does not matter.

A float32 leaf (a parameter, mostly) has one cast in a region, as in torch's cache: its gradients add up in the lower dtype.
Runs right after capture, because later passes replace torch's functions by operators that know no autocast.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import Argument, map_arg

from meshc.errors import CompileError
from meshc.frontend.autocast_policy import (
    DISPATCH_KEYS,
    INSIDE,
    POLICIES,
    Policy,
    Region,
    eligible,
    inner_region,
    operand_dtype,
)
from meshc.frontend.capture import TorchGraph
from meshc.frontend.sources import source_of
from meshc.frontend.traced_gradients import GRADIENT
from meshc.ir import trees
from meshc.ir.functions import Function, Keywords, Target
from meshc.ir.graph import placeholders
from meshc.passes.phases.traced_model import TracedModel
from meshc.passes.trace.chains import attribute, run_call, traced_value
from meshc.passes.trace.checkpoint_regions import CHECKPOINT
from meshc.passes.trace.raise_flex import FLEX
from meshc.private import FakeTensor, FakeTensorMode, OpOverload, TorchDispatchMode

ENTER, EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
_ANYWHERE: Final = "  what to do: call it in a region with enabled=False, with the dtypes that it shall have"
_GRADIENT_WITHIN: Final = (
    "casts are put into a model's own calls, before those of its gradients are there\n"
    "  what to do: take the gradient behind the region, or here under torch.autocast(device_type, enabled=False): backward runs in the "
    "dtypes of its forward, which stays in the region"
)


def lower_autocast(traced: TracedModel) -> TracedModel:
    """Replaces the autocast regions of the model by casts."""
    return replace(traced, model=as_casts(traced.model, traced.mesh.device_type))


def as_casts(traced: TorchGraph, device: str | None = None) -> TorchGraph:
    """Replaces the autocast regions of a graph by casts, in place.

    `device` is the mesh's device type. Capture traces on CPU stand-ins, so a region whose device the model read from a tensor says "cpu":
    it means `device` then, or else that of the region around it. Every other region follows the lists of the device that it names.
    """
    if not any(_has_region(module) for module in traced.module.modules() if isinstance(module, GraphModule)):
        return traced
    inputs = [traced_value(node, traced.module) for node in placeholders(traced.module.graph)]
    lowering = AutocastLowering(traced.module, traced.fake_mode, device)
    with _settings(), torch._C._DisableAutocast(), torch._C._AutoDispatchBelowAutograd(), traced.fake_mode:
        lowering.lower_graph(inputs, [])
    return replace(traced, notes=(*traced.notes, *lowering.notes()))


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """A context without oneDNN's own variants of operators, as in capture; restores the gradient mode, which the graph sets."""
    onednn = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        torch._C._set_mkldnn_enabled(onednn)


def _has_region(module: GraphModule) -> bool:
    return bool(module.graph.find_nodes(op="call_function", target=ENTER))


Result = TypeVar("Result")


class AutocastLowering:
    """A graph (the model's, or the body of a checkpoint), walked once in order with a fake value for every node."""

    def __init__(self, module: GraphModule, fake_mode: FakeTensorMode, device: str | None) -> None:
        self.module, self.graph, self.fake_mode, self.device = module, module.graph, fake_mode, device
        self.values: dict[Node, Any] = {}
        self.casts = Casts()
        self.erased: set[Node] = set()
        self.emitted: set[Node] = set()
        self.retyped: set[torch.dtype] = set()
        self.bodies: list[AutocastLowering] = []

    def lower_graph(self, inputs: Sequence[object], around: list[Region]) -> object:
        """Lowers the graph, whose call is inside the regions `around`, outermost first; returns its fake outputs."""
        stack = list(around)
        outside: dict[Node, int] = {}
        feed = iter(inputs)
        result: object = None
        for node in list(self.graph.nodes):
            if node in self.erased:
                continue
            if node.op == "placeholder":
                self.values[node] = next(feed)
            elif node.op == "get_attr":
                self.values[node] = self._attribute(node)
            elif node.op == "output":
                result = self._value(node.args[0])
            elif node.target is ENTER:
                outside[node] = len(stack)
                stack.append(self._at(node, inner_region, stack, self.device, *node.args))
            elif node.target is EXIT:
                del stack[outside[node.args[0]] :]
                if not stack:  # torch clears its cache
                    self.casts.of_leaf.clear()
            else:
                self._at(node, self._call, node, stack)
                old, new = node.meta.get("example_value"), self.values[node]
                if isinstance(old, Tensor) and isinstance(new, Tensor) and old.dtype != new.dtype:
                    node.meta["example_value"] = new
                    self.retyped.add(old.dtype)
        for node in [node for target in (EXIT, ENTER) for node in self.graph.find_nodes(op="call_function", target=target)]:
            self.graph.erase_node(node)
        self.graph.lint()
        self.module.recompile()
        return result

    def _at(self, node: Node, function: Callable[..., Result], *args: object) -> Result:
        try:
            return function(*args)
        except (AutocastRefused, RuntimeError, TypeError, ValueError) as error:
            name = getattr(node.target, "__name__", node.target)
            advice = "" if error.args == (_GRADIENT_WITHIN,) else f"\n{_ANYWHERE}"
            raise CompileError(f"{name}() at {source_of(node)} cannot be compiled under autocast: {error}{advice}") from error

    def _value(self, argument: Argument) -> Any:
        return map_arg(argument, lambda node: self.values[node])

    def _attribute(self, node: Node) -> object:
        value: object = attribute(node, self.module)
        return self.fake_mode.from_tensor(value) if isinstance(value, Tensor) and not isinstance(value, FakeTensor) else value

    def _call(self, node: Node, stack: list[Region]) -> None:
        region = stack[-1] if stack and stack[-1].enabled else None
        args, kwargs = self._value((node.args, node.kwargs))
        if node.target is CHECKPOINT:
            self.bodies.append(AutocastLowering(args[0], self.fake_mode, self.device))
            self.values[node] = self.bodies[-1].lower_graph(args[1:], stack)
        elif node.target is GRADIENT:
            if region:
                raise AutocastRefused(_GRADIENT_WITHIN)
            # fake gradients: in the shapes of the trace and the dtypes of the inputs here, since autograd is off
            pairs = zip(node.meta["example_value"], [args[1]] if isinstance(args[1], Tensor) else args[1], strict=True)
            self.values[node] = [one if one is None else one.to(x.dtype) for one, x in pairs]
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            if region and node.target is FLEX:
                args, region = (*self._flex(node, args[:3], region), *args[3:]), None
            if region or any(_has_region(leaf) for leaf in trees.leaves((args, kwargs)) if isinstance(leaf, GraphModule)):
                raise AutocastRefused("of the operators that take functions, meshc lowers autocast in checkpoint only")
            self.values[node] = run_call(node, args, kwargs)
        elif region is None:
            self.values[node] = run_call(node, args, kwargs)
        else:
            with AtenCallRecorder(region.device, region, self.casts) as watch:
                self.values[node] = run_call(node, args, kwargs)
            if watch.made and not self._hoist(node, watch, args, kwargs):
                self._expand(node, watch)

    def _flex(self, node: Node, operands: Sequence[Tensor], region: Region) -> list[Tensor]:
        """torch casts queries, keys and values of flex_attention; its score functions run outside the region."""
        args, values = [*node.args], [*operands]
        for place, value in enumerate(operands):
            used = args[place]
            assert isinstance(used, Node)
            if eligible(value.dtype) and value.dtype != region.dtype:
                values[place] = self.casts.make(value, region.dtype, region)
                args[place] = self._cast_node(values[place], used, node)
        node.args = tuple(args)
        return values

    def _hoist(self, node: Node, watch: AtenCallRecorder, args: Sequence[object], kwargs: Keywords) -> bool:
        """Puts the casts in front of the call, if the call then does what torch does: the same ATen calls on the same dtypes."""
        operands = tensors((args, kwargs))
        uses = Counter(map(id, operands))
        made = defaultdict[int, list[Tensor]](list)
        for cast in {id(cast): cast for cast in watch.made}.values():
            made[id(self.casts.source[id(cast)])].append(cast)
        if any(len(casts) not in (1, uses[source]) for source, casts in made.items()):
            return False  # cast several times inside, and each cast has a gradient of its own

        def turns() -> dict[int, Iterator[Tensor]]:
            return {source: iter(casts * (uses[source] // len(casts))) for source, casts in made.items()}

        turn = turns()
        cast_args, cast_kwargs = trees.map_leaves(lambda leaf: next(turn[id(leaf)]) if id(leaf) in turn else leaf, (args, kwargs))
        try:
            with AtenCallRecorder(watch.device, None, self.casts) as plain:
                result = run_call(node, cast_args, cast_kwargs)
        except (RuntimeError, TypeError, ValueError):
            return False
        first = {id(operand): position for position, operand in reversed(list(enumerate(operands)))}
        names = [first[id(operand)] for operand in operands]
        if trace(watch, operands, names, self.values[node]) != trace(plain, tensors((cast_args, cast_kwargs)), names, result):
            return False
        turn = turns()

        def argument(used: Node) -> Argument:
            if not any(id(leaf) in turn for leaf in tensors(self.values[used])):
                return used
            wires = self._wires([used], node)

            def leaf_argument(leaf: object) -> object:
                if id(leaf) in turn:
                    return self._cast_node(next(turn[id(leaf)]), wires[id(leaf)], node)
                return wires.get(id(leaf), leaf)

            rewired: Argument = trees.map_leaves(leaf_argument, self.values[used])
            return rewired

        node.args, node.kwargs = map_arg((node.args, node.kwargs), argument)
        return True

    def _expand(self, node: Node, watch: AtenCallRecorder) -> None:
        """Replaces the call by the recorded ATen calls, with their casts."""
        wires = self._wires(node.all_input_nodes, node)

        def wire(leaf: object) -> object:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in wires:
                source = self.casts.source.get(id(leaf))
                if source is None or id(source) not in wires:
                    raise AutocastRefused("it uses a tensor that is no operand")
                wires[id(leaf)] = self._cast_node(leaf, wires[id(source)], node)
            return wires[id(leaf)]

        for call in watch.calls:
            name = call.function.name()
            if torch.Tag.nondeterministic_seeded in call.function.tags and name not in WHOLE:
                raise AutocastRefused(f"it draws random numbers by {name}")
            args, kwargs = trees.map_leaves(wire, (call.args, call.kwargs))
            new = self._emit("call_function", WHOLE.get(name, call.function), args, kwargs, call.out, node)
            wires.update(self._wires([new], node))
        structure = trees.map_leaves(wire, self.values[node])
        for user in list(node.users):
            part = structure[user.args[1]] if user.target is operator.getitem else None
            if isinstance(part, Node):
                user.replace_all_uses_with(part)
                self._erase(user)
            elif isinstance(structure, (Node, tuple, list)) and user.target is not getattr:
                user.args, user.kwargs = map_arg((user.args, user.kwargs), lambda used: structure if used is node else used)
            else:
                raise AutocastRefused("its result is used in a way that meshc does not know")
        self._erase(node)

    def _erase(self, node: Node) -> None:
        self.erased.add(node)
        self.graph.erase_node(node)

    def _wires(self, nodes: Sequence[Node], near: Node) -> dict[int, Node]:
        """By tensor id, the node of every tensor that `nodes` have as values, themselves or in a list."""
        wires: dict[int, Node] = {}

        def visit(node: Node, value: object) -> None:
            if isinstance(value, Tensor):
                wires[id(value)] = node
            elif isinstance(value, (tuple, list)):
                for index, item in enumerate(value):
                    if tensors(item):
                        visit(self._emit("call_function", operator.getitem, (node, index), {}, item, near), item)

        for node in nodes:
            visit(node, self.values[node])
        return wires

    def _cast_node(self, cast: Tensor, source: Node, near: Node) -> Node:
        if id(cast) not in self.casts.node:
            self.casts.node[id(cast)] = self._emit("call_method", "to", (source, cast.dtype), {}, cast, near)
        return self.casts.node[id(cast)]

    def _emit(
        self, op: str, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Argument], value: object, near: Node
    ) -> Node:
        with self.graph.inserting_before(near):
            node = self.graph.create_node(op, target, args, kwargs)
        node.meta = {key: near.meta[key] for key in ("stack_trace", "nn_module_stack") if key in near.meta}
        node.meta["example_value"] = self.values[node] = value
        self.emitted.add(node)
        return node

    def notes(self) -> list[str]:
        """Lines of the model that seem to read a tensor's dtype, in a graph where tensors had other dtypes as traced than on the device."""
        found = [note for body in self.bodies for note in body.notes()]
        for node in self.graph.nodes:
            source = source_of(node)
            named = {leaf for leaf in trees.leaves((node.args, node.kwargs)) if isinstance(leaf, torch.dtype)}
            for dtype in named & self.retyped if node not in self.emitted else ():
                word = str(dtype).removeprefix("torch.")
                if word not in source.code and word.removesuffix("32") + "(" not in source.code:
                    place = f"{source.file.rsplit('/', 1)[-1]}:{source.line}: {source.code}"
                    found.append(f"{place}\n  {dtype} here may be a tensor's dtype as traced; under autocast it is another on the device")
        return list(dict.fromkeys(found))


# ATen calls of a torch-level call, recorded at the level of torch's autocast, with the casts of their operands.
#
# A `TorchDispatchMode` below autograd sees the same operators as autocast's dispatch key above it, if it decomposes, by torch's own
# kernels, each composite that is not on the device's list. A listed operator is not decomposed, as in torch.


WHOLE: dict[str, Function] = {
    "aten::dropout": torch.dropout,
    "aten::feature_dropout": torch.feature_dropout,
    "aten::alpha_dropout": torch.alpha_dropout,
    "aten::feature_alpha_dropout": torch.feature_alpha_dropout,
    "aten::scaled_dot_product_attention": torch.nn.functional.scaled_dot_product_attention,
}
"""Composites that are not decomposed, because later passes know them by these names."""


@dataclass
class AtenCall:
    """One ATen call with its fake operands (after their casts) and results."""

    function: OpOverload
    args: Sequence[object]
    kwargs: Keywords
    out: object


@dataclass
class Casts:
    """The casts of a graph so far, by ids of fake tensors, which `alive` keeps alive."""

    source: dict[int, Tensor] = field(default_factory=dict)
    node: dict[int, Node] = field(default_factory=dict)
    of_leaf: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)

    def make(self, tensor: Tensor, dtype: torch.dtype, region: Region) -> Tensor:
        """torch's `cached_cast`: float32 leaves that require a gradient share one cast to the region's dtype."""
        leaf = tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
        shared = leaf and region.cache and dtype == region.dtype
        if shared and (id(tensor), dtype) in self.of_leaf:
            return self.of_leaf[id(tensor), dtype]
        cast = tensor.to(dtype)
        self.source[id(cast)] = tensor
        self.alive += [tensor, cast]
        if shared:
            self.of_leaf[id(tensor), dtype] = cast
        return cast


class AtenCallRecorder(TorchDispatchMode):
    """Records the ATen calls of a torch-level call; with a region, casts their operands as torch would."""

    def __init__(self, device: str, region: Region | None, casts: Casts) -> None:
        super().__init__()
        self.device, self.region, self.casts = device, region, casts
        self.calls: list[AtenCall] = []
        self.made: list[Tensor] = []

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Sequence[object] = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs, name = kwargs or {}, function.name()
        if function.namespace == "prim":  # a query (`prim::device`), no call
            return function(*args, **kwargs)
        policy = _policy(self.device, name)
        if policy is None and name not in WHOLE and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            with self:
                return function._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        if self.region is not None and policy is not None:
            args, kwargs = self._cast(name, policy, self.region, args, kwargs)
        elif self.region is not None and name in INSIDE[self.device]:
            before = len(self.made)
            self._cast(name, INSIDE[self.device][name], self.region, args, kwargs)
            if len(self.made) > before:
                raise AutocastRefused(f"torch casts inside the kernel of {name}, where autograd does not see it")
        out = function(*args, **kwargs)
        self.calls.append(AtenCall(function, args, kwargs, out))
        return out

    def _cast(
        self, name: str, policy: Policy, region: Region, args: Sequence[object], kwargs: Keywords
    ) -> tuple[Sequence[object], Keywords]:
        leaves = trees.leaves((args, kwargs))
        dtypes = [leaf.dtype for leaf in tensors(leaves) if eligible(leaf.dtype)]
        try:
            dtype = operand_dtype(policy, region, dtypes, any(isinstance(leaf, torch.dtype) for leaf in leaves))
        except ValueError as error:
            raise AutocastRefused(f"{name}: {error}") from None

        def cast(leaf: object) -> object:
            if dtype is None or not isinstance(leaf, Tensor) or leaf.dtype == dtype or not eligible(leaf.dtype):
                return leaf
            self.made.append(self.casts.make(leaf, dtype, region))
            return self.made[-1]

        casted: tuple[Sequence[object], Keywords] = trees.map_leaves(cast, (args, kwargs))
        return casted


class AutocastRefused(Exception):
    """Why a call of a region cannot be lowered."""


@functools.cache
def _policy(device: str, name: str) -> Policy | None:
    policy = POLICIES[device].get(name)
    if policy is None and torch._C._dispatch_has_kernel_for_dispatch_key(name, DISPATCH_KEYS[device]):
        raise AutocastRefused(f"{name} has an autocast rule for {device} that meshc does not know")
    return policy


def tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in trees.leaves(tree) if isinstance(leaf, Tensor)]


def trace(watch: AtenCallRecorder, operands: list[Tensor], names: list[int], result: object) -> list[object]:
    """The ATen calls of a call, with a name and a dtype in place of each tensor; a cast operand keeps its operand's name."""
    name_of: dict[int, object] = dict(zip(map(id, operands), names, strict=True))

    def name(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return repr(leaf)
        source = leaf if id(leaf) in name_of else watch.casts.source.get(id(leaf), leaf)
        if id(source) not in name_of:
            raise AutocastRefused("it uses a tensor that is no operand")
        return name_of[id(source)], leaf.dtype

    rows: list[object] = []
    for number, call in enumerate(watch.calls):
        rows.append((call.function.name(), [*map(name, trees.leaves((call.args, call.kwargs)))]))
        name_of |= {id(leaf): (number, position) for position, leaf in enumerate(tensors(call.out))}
    return [*rows, [*map(name, trees.leaves(result))]]
