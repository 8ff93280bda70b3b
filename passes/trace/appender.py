"""Builder that appends operators to a graph of the global view."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument, map_arg

from meshc.ir import Record, Source, record, set_record
from meshc.ir.functions import Function
from meshc.ir.graph import output_of, placeholders


class Appender:
    """Adds global-view nodes before a graph's output; shapes and dtypes come from meta tensors."""

    def __init__(self, graph: Graph, phase: str, source: Source | None = None) -> None:
        self.graph, self.phase, self.source = graph, phase, source or Source()
        self.meta: dict[Node, object] = {}
        self.output = output_of(graph)
        self.made: list[Node] = []

    def _value(self, node: Node) -> Any:
        if node not in self.meta:
            found = record(node)
            self.meta[node] = torch.empty(found.shape, dtype=found.dtype, device="meta")
        return self.meta[node]

    def call(self, target: Function, *args: Argument, **kwargs: Argument) -> Node:
        with self.graph.inserting_before(self.output):
            node = self.graph.call_function(target, args, kwargs)
        values, named = map_arg((args, {**kwargs, "device": "meta"} if "device" in kwargs else kwargs), self._value)
        result = self.meta[node] = target(*values, **named)
        self.made.append(node)
        set_record(node, tuple(map(self._record, result)) if isinstance(result, list | tuple) else self._record(result))
        return node

    def _record(self, result: object) -> Record:
        shape, dtype = (tuple(result.shape), result.dtype) if isinstance(result, torch.Tensor) else ((), None)
        return Record(shape, dtype, source=self.source, phase=self.phase)

    def placeholder(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Node:
        with self.graph.inserting_after(placeholders(self.graph)[-1]):
            node = self.graph.placeholder("".join(c if c.isalnum() else "_" for c in name))
        set_record(node, Record(shape, dtype, phase=self.phase))
        return node
