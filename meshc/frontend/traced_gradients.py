"""`torch.autograd.grad` in a traced model or loss: one call of the graph, which AOTAutograd runs like any other.

    x.requires_grad_()                                          x is  leaf_of(x)  from there on: a leaf of the trace
    torch.zeros(3, requires_grad=True)                          leaf_of(torch.zeros(3))
    (g,) = torch.autograd.grad(u.sum(), x, create_graph=True)   itself: its operators, and their derivatives, are the trace's
    torch.autograd.functional.hessian(f, x)                     torch's own Python of it, traced

Dynamo's own way (`trace_autograd_ops`) is for an outer backward that cannot go through a graph twice: it refuses leaves that a compiled
function returns, and in torch 2.11 all leaves created inside. A program is traced with its backward, and no call frees a graph that another
goes through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshc.replacements import replace_targets

GRADIENT: Final = torch.autograd.grad
RETAINED: Final = 3
"""Position of `retain_graph` among the arguments."""


@contextmanager
def traced_gradients() -> Iterator[None]:
    """A context for tracing, in which gradients and leaves are calls of the graph."""
    from meshc.private import variables

    call = _call_handler(variables.TorchInGraphFunctionVariable.call_function)
    with replace_targets(torch_call=call, leaf_mark=_requires_grad_handler(variables.TensorVariable.method_requires_grad_)):
        yield


class RetainedGraphs(TorchFunctionMode):
    """A context for calls of a model beside its program: `torch.autograd.grad` retains its graph, as in a trace."""

    def __torch_function__(self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is GRADIENT and len(args) <= RETAINED:
            kwargs = {**kwargs, "retain_graph": True}
        return func(*args, **kwargs)


def leaf_of(x: Tensor) -> Tensor:
    """A tensor of the same values, with respect to which gradients can be taken."""
    return x.detach().requires_grad_()


def _call_handler(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo's handler of torch calls, which also traces gradients and `requires_grad=True`."""

    def call(self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        from meshc.private import variables

        if self.value is GRADIENT:
            return _gradient(tx, list(args), kwargs)
        if getattr(self.value, "__module__", "") == torch.autograd.functional.__name__:
            return variables.UserFunctionVariable(self.value, source=self.source).call_function(tx, list(args), kwargs)
        asked = kwargs.get("requires_grad")
        if asked is None or not asked.is_python_constant() or asked.as_python_constant() is not True:
            return plain(self, tx, args, kwargs)
        made = plain(self, tx, args, {name: value for name, value in kwargs.items() if name != "requires_grad"})
        return made.method_requires_grad_(tx) if isinstance(made, variables.TensorVariable) else made

    return call


def _gradient(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The call as a node; None where an input is not used."""
    from meshc.private import dynamo_utils, variables, wrap_fx_proxy

    named = {**dict(zip(("outputs", "inputs"), args, strict=False)), **kwargs}
    for name in ("outputs", "inputs"):
        given = named[name].realize()
        if not isinstance(given, variables.TensorVariable):
            given = variables.BuiltinVariable(tuple).call_function(tx, [given], {})
        named[name] = given
    more, kept = args[2:], variables.ConstantVariable.create(True)
    if len(args) > RETAINED:
        more[RETAINED - 2] = kept
    else:
        named["retain_graph"] = kept
    args = [named.pop("outputs"), named.pop("inputs"), *more]
    return wrap_fx_proxy(tx, tx.output.create_proxy("call_function", GRADIENT, *dynamo_utils.proxy_args_kwargs(args, named)))


def _requires_grad_handler(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`requires_grad_` that makes leaves of computed tensors and inputs; parameters are as they are outside."""

    def become_leaf(self: Any, tx: Any, requires_grad: Any = True) -> Any:
        from meshc.private import wrap_fx_proxy

        wanted = requires_grad if isinstance(requires_grad, bool) else requires_grad.as_python_constant()
        proxy = self.as_proxy()
        value = proxy.node.meta["example_value"]
        own = proxy.tracer is tx.output.current_tracer
        if not wanted or value.requires_grad or isinstance(value, nn.Parameter) or not own:
            return plain(self, tx, requires_grad)
        leaf: Any = wrap_fx_proxy(tx, tx.output.create_proxy("call_function", leaf_of, (proxy,), {}))
        self.proxy, self.requires_grad = leaf.proxy, True
        return self

    return become_leaf
