"""Builder that appends operators to a graph of the global view."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

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

    def value(self, argument: object) -> object:
        if isinstance(argument, Node):
            if argument not in self.meta:
                found = record(argument)
                self.meta[argument] = torch.empty(found.shape, dtype=found.dtype, device="meta")
            return self.meta[argument]
        if isinstance(argument, list | tuple):
            return type(argument)(self.value(item) for item in argument)
        return argument

    def call(self, target: Function, *args: Argument, **kwargs: Argument) -> Node:
        with self.graph.inserting_before(self.output):
            node = self.graph.call_function(target, args, kwargs)
        given = {key: self.value(item) for key, item in kwargs.items()}
        if "device" in given:
            given["device"] = "meta"
        result = target(*map(self.value, args), **given)
        self.meta[node] = result
        self.made.append(node)
        if isinstance(result, list | tuple):
            set_record(node, tuple(self._record(item) for item in result))
        else:
            set_record(node, self._record(result))
        return node

    def _record(self, result: object) -> Record:
        if isinstance(result, torch.Tensor):
            return Record(tuple(result.shape), result.dtype, source=self.source, phase=self.phase)
        return Record(source=self.source, phase=self.phase)

    def placeholder(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Node:
        with self.graph.inserting_after(placeholders(self.graph)[-1]):
            node = self.graph.placeholder("".join(c if c.isalnum() else "_" for c in name))
        set_record(node, Record(shape, dtype, phase=self.phase))
        return node
