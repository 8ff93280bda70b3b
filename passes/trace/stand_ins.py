"""Replacement of torch calls in a captured graph by meshc's functions, each result compared with torch's on fake tensors.

    rand = torch.rand(size=(4, 6), device=cpu)                     rand = _raised_rand((4, 6), seed_step=seed, call=0)
    attn = scaled_dot_product_attention(query=q, key=k, ...)       attn = sdpa(q, k, ...)

Part of `raise_ops`. The call is read by torch's own signature (`meshc/ops/signatures.py`). The function's result on the trace's fake
tensors is compared with torch's: shape, dtype, device, layout. A difference ends the compilation with the user's line.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from meshc.errors import CompileError
from meshc.frontend.capture import TorchGraph
from meshc.frontend.double_copy import double_by_default, wide_dtype
from meshc.frontend.in_place_changes import is_changed_later
from meshc.frontend.inner_transforms import within_transforms
from meshc.frontend.sources import source_of
from meshc.ir import trees
from meshc.ops.signatures import arguments_for, bind_arguments, signatures
from meshc.passes.trace.chains import run_call, traced_value

LIES: Final = ("out", "device", "layout", "pin_memory", "memory_format", "requires_grad", "names", "generator")
"""Arguments for a result's device and layout, and for the generator: the program decides these. Visible effects are compared."""

NOTHING: Final = "NoneType"
"""Description of a result that nobody reads, such as a statistic of `flex_attention`."""


def read_by_place(node: Node) -> None:
    """Rewrites a call's arguments by torch's signature: positional up to the first that is left out."""
    target: Any = node.target
    named = bind_arguments(target, node.args, node.kwargs)
    signature = next(one for one in signatures(target) if set(named) <= {p.name for p in one})
    first = itertools.takewhile(lambda p: not p.keyword_only and p.name in named, signature)
    node.args, node.kwargs = tuple(named.pop(p.name) for p in first), named


@dataclass(frozen=True)
class StandIns:
    """Stand-ins of one torch-level graph. In a copy in double precision, casts to single precision have become casts to double."""

    model: TorchGraph

    @cached_property
    def transformed_nodes(self) -> frozenset[Node]:
        """Calls within a transform of torch.func, which stay torch's own."""
        return within_transforms(self.model.module.graph)

    def replace_call(self, node: Node, function: Callable[..., Any], **more: Any) -> None:
        """Replaces the target of a node by `function`; `more` are additional arguments."""
        target: Any = node.target
        written = bind_arguments(target, node.args, node.kwargs).get("out")
        args, kwargs = arguments_for(function, target, node.args, node.kwargs, without=LIES)
        if written is not None and "dtype" in inspect.signature(function).parameters:
            kwargs["dtype"] = self._example(written).dtype
        node.op, node.target = "call_function", function
        node.args, node.kwargs = args, {**kwargs, **more}
        self.compare(node)
        if written is not None:  # the tensor passed as `out=`, which the call returns
            _read_behind(node, "copy_", (written, node))

    def compare(self, node: Node) -> None:
        """Compares a stand-in's result on the trace's values with torch's. Raises TypeError if they differ."""
        wanted = node.meta.get("example_value")
        if wanted is None:
            return
        try:
            made = self._run_node(node)
        except CompileError as error:
            what, _, rest = str(error).partition("\n")
            raise CompileError(f"{what}\n  in your model: {source_of(node)}\n{rest}") from error
        mine, torchs = ([*map(self._describe_value, trees.leaves(value))] for value in (made, wanted))
        if len(mine) != len(torchs) or any(one not in (other, NOTHING) for one, other in zip(mine, torchs, strict=True)):
            raise TypeError(f"what stands for this call gives {', '.join(mine)}, where torch gives {', '.join(torchs)}")

    def _run_node(self, node: Node) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), self._example)
        with self.model.fake_mode, torch.no_grad(), torch._C._DisableAutocast(), double_by_default(self.model.double):
            return run_call(node, args, kwargs)

    def _example(self, node: Node) -> Any:
        """The value of a node in the trace."""
        found = traced_value(node, self.model.module)
        return self._run_node(node) if found is None else found

    def _describe_value(self, value: object) -> str:
        if not isinstance(value, Tensor):
            return type(value).__name__
        extents: tuple[Any, ...] = value.shape
        shape = [extent.node.hint if isinstance(extent, torch.SymInt) else extent for extent in extents]  # as traced
        return f"{wide_dtype(value.dtype, self.model.double)} {shape} {value.layout} on {value.device.type}".replace("torch.", "")


def _read_behind(call: Node, method: str, args: tuple[Node, ...], **kwargs: Any) -> None:
    """Has the readers of a call read what `method` makes of it."""
    with call.graph.inserting_after(call):
        made = call.graph.call_method(method, args, kwargs)
    made.meta.update(call.meta)
    call.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


# Clones of call results that a reader changes in place.
#
#     out = weighed(q, k, v);  out += x               becomes              out = weighed(q, k, v);  copy = out.clone();  copy += x
#
# The operator may read its result again in backward, where the call that it replaces did not (a product needs its operands alone), and
# torch's autograd refuses values that have changed since.


def own_result(call: Node) -> None:
    """`call` is one that an operator of meshc's has replaced."""
    if is_changed_later(call):
        example = call.meta.get("example_value")
        plain = isinstance(example, Tensor) and example.is_contiguous()  # a view of the one is to be a view of the other
        _read_behind(call, "clone", (call,), **{"memory_format": torch.contiguous_format} if plain else {})
