"""Calls inserted into a torch-level graph, with their values on the fake tensors of its trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from meshc.private import FakeTensor


class InsertedCalls:
    """Inserts calls into one graph. Raises StopIteration for a graph without tensors."""

    def __init__(self, module: GraphModule) -> None:
        self._module, self._graph = module, module.graph
        examples = [one.meta.get("example_value") for one in self._graph.nodes]
        self._mode = next(one.fake_mode for one in examples if isinstance(one, FakeTensor))

    def _call(self, like: Node, target: Any, /, *args: Any, **kwargs: Any) -> Node:
        """A call before `like`, with its source; a method by its name."""
        with self._graph.inserting_before(like):
            made = self._graph.create_node("call_method" if isinstance(target, str) else "call_function", target, args, kwargs)
        made.meta = {key: value for key, value in like.meta.items() if key not in ("example_value", "val", "unbacked_bindings")}
        made.meta["example_value"] = self._example(made.op, made.target, made.args, made.kwargs)
        return made

    def _example(self, op: str, target: Any, args: Any, kwargs: Any) -> Any:
        given, named = map_arg((args, kwargs), lambda one: one.meta["example_value"])
        with self._mode:
            return getattr(given[0], target)(*given[1:], **named) if op == "call_method" else target(*given, **named)


def map_arguments(node: Node, function: Callable[[Node], Any]) -> tuple[Any, Any]:
    """The arguments of a call, with `function` applied to nodes."""
    given: Any = (node.args, node.kwargs)
    args, kwargs = map_arg(given, function)
    return args, kwargs
