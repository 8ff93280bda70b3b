"""Experts in a list or dict of modules, which the model's code loops over, traced as one product for all of them.

    model:      for each expert: where it is chosen, its rows, its forward, added where they came from
    traced:     stack the weights of all experts; rows of all choices, products by the expert of each, sum over the choices of a token

A loop is replaced if every statement of it is understood (`loop_of`), the experts have equal structure, and their forward computes
each row independently (`expert_tape.py`). Parameters stay the experts' own, and are stored as the plan says; where axes split the experts,
a rank takes its own part of the stack. Where the loop writes its experts out, by rows of stacked weights, the stack is the parameter
(`OneExpert`). Some stock layers are recognised by class (`known_experts.py`).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from operator import attrgetter
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshc.errors import CaptureError
from meshc.frontend.expert_capacity import Capacity
from meshc.frontend.expert_placement import CALL, copies_per_rank, is_stock, slots_of, stacked_parameters
from meshc.frontend.expert_rows import FORM, ExpertForm, Layout, routed_sum
from meshc.frontend.expert_tape import NotRows, Tape, evaluate, play, record
from meshc.frontend.libraries.known_experts import KNOWN, ROUTERS
from meshc.frontend.traced_code import name_of
from meshc.lazy_module import LazyModule
from meshc.ops.expert_slots import experts_by_slot, in_order

if TYPE_CHECKING:
    from meshc.frontend import loop_reader
    from meshc.frontend.loop_reader import Loop
else:
    loop_reader = LazyModule("meshc.frontend.loop_reader")  # most models have no loop over experts

ZEROS: Final = "have gradients of zeros"
"""Words of a note on parameters that have no gradient on one device."""
PLAIN: Final = (int, float, str, bool, type(None), torch.dtype)


def is_listed(module: nn.Module) -> bool:
    """Whether a module loops over experts that this file traces as one product."""
    return name_of(type(module)) in KNOWN or loop_of(module) is not None


def is_of_all(module: nn.Module) -> bool:
    """Whether a module gives its experts all tokens. torch traces such a loop as it is: it is replaced only where axes split the
    experts."""
    loop = loop_of(module)
    return loop is not None and loop.of_all


def looped_expert_counts(model: nn.Module) -> dict[str, int]:
    """Number of experts, by the path of each module that loops over modules and gives each expert its own tokens."""
    found = [(path, each, loop_of(each)) for path, each in model.named_modules()]
    return {path: loop.count(each) for path, each, loop in found if loop is not None and loop.inline is None and not loop.of_all}


@contextmanager
def listed_experts(module: nn.Module) -> Iterator[None]:
    """A context in which loops over experts are one product. Raises CaptureError for experts that cannot be: their loop cannot be traced
    either."""
    marked: list[nn.Module] = []
    try:
        for path, each in module.named_modules():
            if name_of(type(each)) in ROUTERS:
                marked.append(_uncast_classifier(path, each))
            function = _forward(path, each)
            if function is not None and "forward" not in each.__dict__:
                each.__dict__["forward"] = MethodType(function, each)
                marked.append(each)
        yield
    finally:
        for each in marked:
            for name in ("forward", "to", CALL):
                each.__dict__.pop(name, None)


@contextmanager
def formed_experts(
    module: nn.Module,
    groups: Callable[[str], int],
    bound: float | None = None,
    batch: int = 1,
    capacity: Capacity | None = None,
    behind: bool = False,
) -> Iterator[None]:
    """A context in which the experts at each path are traced in `groups(path)` groups, with `capacity`; `behind`: see `ExpertForm`."""
    marked = []
    try:
        for path, each in module.named_modules():
            if not is_stock(each) and not is_listed(each):
                continue
            form = ExpertForm(groups(path), bound, batch, None if is_of_all(each) else capacity, copies_per_rank(each), behind)
            if form.count > 1 or form.capacity is not None or (behind and is_stock(each)):
                each.__dict__[FORM] = form
                marked.append(each)
        yield
    finally:
        for each in marked:
            del each.__dict__[FORM]


def unchosen_parameters(module: nn.Module) -> dict[str, tuple[tuple[str, int], ...]]:
    """Parameters that have no gradient where their expert, or cluster of an adaptive softmax, is not chosen -> (path of a module that loops
    over it, its number there) for each."""
    places: dict[int, list[tuple[str, int]]] = {}
    within: set[int] = set()
    for path, each in module.named_modules():
        loop = loop_of(each)
        modules: list[nn.Module] = []
        if loop is not None and loop.skips and loop.inline is None:  # stacked weights always have a gradient
            modules = loop.experts(each)
        if isinstance(each, nn.AdaptiveLogSoftmaxWithLoss):
            modules = list(each.tail)
        for number, expert in enumerate(modules):
            within |= {id(inner) for inner in expert.modules()}
            for parameter in expert.parameters():
                places.setdefault(id(parameter), []).append((path, number))
    others = {id(p) for each in module.modules() if id(each) not in within for p in each.parameters(recurse=False)}
    names = [(name, id(parameter)) for name, parameter in module.named_parameters()]
    return {name: tuple(places[which]) for name, which in names if which in places and which not in others}


def _forward(path: str, module: nn.Module) -> Callable[..., object] | None:
    """The forward of a module while it is traced; None: its own."""
    if (own := KNOWN.get(name_of(type(module)))) is not None:
        return own
    loop = loop_of(module)
    if loop is None or (loop.of_all and FORM not in module.__dict__):
        return None
    tape = _tape(path, module, loop)
    module.__dict__[CALL] = partial(_add_experts, loop, tape, module)
    return loop.forward


def _uncast_classifier(path: str, router: Any) -> nn.Module:
    """The layer that a router casts in forward, with a `to` that returns it. Raises CaptureError if its dtype differs from the router's."""
    layer: nn.Module = router.classifier
    if any(each.dtype != router.dtype for each in layer.parameters()):
        raise CaptureError(
            f"the router {path} casts its classifier to {router.dtype} in forward, in the middle of training\n"
            f"  what to do: call model.{path}.classifier.to({router.dtype}) for each such router before compiling, or give the config the "
            "model's own dtype as router_dtype"
        )
    layer.__dict__["to"] = lambda dtype: layer
    return layer


def _tape(path: str, module: nn.Module, loop: Loop) -> Tape:
    experts = loop.experts(module) if loop.inline is None else [loop_reader.OneExpert(module, loop.inline)]
    for number, other in enumerate(experts[1:], 1):
        if (difference := _differ(experts[0], other)) is not None:
            raise CaptureError(_refusal(path, module, loop, f"expert 0 and expert {number} differ: {difference}"))
    try:
        return record(experts[0])
    except NotRows as why:
        raise CaptureError(_refusal(path, module, loop, f"of an expert's forward, {why}")) from why


def _refusal(path: str, module: nn.Module, loop: Loop, why: str) -> str:
    code = type(module).forward.__code__
    return (
        f"the loop over experts of {path or 'the model'} cannot be traced as one product\n  in your model: {code.co_filename}:{loop.line}\n"
        f"  why: {why}\n"
        f"  what to do: {'experts of one class and size, made of nn.Linear' if loop.inline is None else 'F.linear(rows, self.weight[e])'} "
        "and operators that treat each row by itself"
    )


def _differ(one: nn.Module, other: nn.Module) -> str | None:
    """How two modules differ in structure; None if they do not."""
    if type(one) is not type(other):
        return f"a {type(one).__name__} and a {type(other).__name__}"
    if one.extra_repr() != other.extra_repr() or one.training != other.training:
        return f"{one.extra_repr()} and {other.extra_repr()}, training {one.training} and {other.training}"
    for name in {*one.__dict__, *other.__dict__}:
        values = [each.__dict__.get(name) for each in (one, other)]
        if all(isinstance(value, PLAIN) for value in values) and values[0] != values[1]:
            return f"{name} is {values[0]} and {values[1]}"
        if callable(values[0]) and not isinstance(values[0], nn.Module) and values[0] is not values[1]:
            return f"{name} is {values[0]} and {values[1]}"
    kinds = [{name: (p.shape, p.dtype, p.requires_grad) for name, p in each.named_parameters(recurse=False)} for each in (one, other)]
    if kinds[0] != kinds[1]:
        return "their parameters"
    mine, theirs = dict(one.named_children()), dict(other.named_children())
    if list(mine) != list(theirs):
        return "what they are made of"
    return next((found for name in mine if (found := _differ(mine[name], theirs[name])) is not None), None)


def _add_experts(loop: Loop, tape: Tape, module: nn.Module, values: dict[str, Any], before: Tensor) -> Tensor:
    """The call in the place of the loop: adds to `before` the weighted sum of the outputs of x [.., h]'s chosen experts, choices [..,
    k]. `values`: of the forward, by name."""
    experts = loop.count(module)
    if tape.draws and getattr(module, FORM, ExpertForm()).count > 1:
        raise CaptureError(
            "these experts have dropout, and what a row of theirs draws would follow from how many ranks split them; "
            "what to do: a dropout of 0 inside experts, or no axis that splits them"
        )
    x, choice, weights = evaluate(loop.values, {"self": module, **values}.__getitem__)
    tokens, slots = x.reshape(-1, x.shape[-1]), slots_of(module)
    if loop.single and choice is not None and choice.shape not in (x.shape[:-1], (*x.shape[:-1], 1)):
        raise CaptureError(
            f"the loop over experts at line {loop.line} writes a row for each token, and has choices {list(choice.shape)} for tokens "
            f"{list(x.shape)}; what to do: where a token has several choices, out[token] += weights[token, slot, None] * expert(x[token])"
        )
    choice, weights = _choices(loop, choice, weights, tokens, experts)

    def weight(which: str) -> Tensor:
        read = attrgetter(which)
        if loop.inline is not None:
            return read(module)
        stacked = torch.stack([read(each) for each in loop.experts(module)])
        return stacked if slots is None else in_order(stacked, experts_by_slot(slots), slots)

    def expert_sum(x: Tensor, layout: Layout) -> Tensor:
        return layout.back(_replay_tape(tape, weight, x, layout) * layout.weights)

    out = routed_sum(expert_sum, tokens, choice, weights, experts, module, some=True)
    out = out.reshape(before.shape).to(before.dtype)
    return before.copy_(out) if loop.blank else before.add_(out)  # in place, as the loop does: another name may be a view of it


def _choices(loop: Loop, choice: Tensor | None, weights: Tensor | None, tokens: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Choices and weights [t, k] as the loop reads them: a choice that is no expert's number becomes -1, with weight 0. None: all
    experts."""
    count = tokens.shape[0]
    if choice is None:
        choice = torch.arange(experts, device=tokens.device).expand(count, -1)
        return choice, _weights(loop, choice, weights, tokens, experts)
    if loop.one_hot:
        ones = choice.reshape(count, -1, choice.shape[-1])
        choice = torch.where(ones.sum(-1) > 0, ones.argmax(-1), -1)
    choice = choice.reshape(count, -1).to(torch.int64)
    if loop.once and choice.shape[1] > 1:
        later = torch.ones(choice.shape[1], choice.shape[1], dtype=torch.bool, device=choice.device).triu(1)
        choice = torch.where(((choice.unsqueeze(2) == choice.unsqueeze(1)) & later).any(2), -1, choice)
    weights = _weights(loop, choice, weights, tokens, experts)
    if choice.shape[1] == experts > 1:  # as many slots as experts: an expert may occur in several
        there = F.one_hot(torch.where((choice >= 0) & (choice < experts), choice, experts), experts + 1)[..., :experts]
        weights = (there * weights.unsqueeze(-1)).sum(1)
        choice = torch.where(there.sum(1) > 0, torch.arange(experts, device=choice.device), -1)
    choice = torch.where((choice >= 0) & (choice < experts), choice, -1)
    return choice, torch.where(choice < 0, 0.0, weights)


def _weights(loop: Loop, choice: Tensor, weights: Tensor | None, tokens: Tensor, experts: int) -> Tensor:
    """The weight of each choice [t, k]. Raises CaptureError for weights of another shape."""
    if weights is None:
        return torch.ones_like(choice, dtype=tokens.dtype)
    wanted = {"choice": choice.numel(), "token": choice.shape[0], "expert": choice.shape[0] * experts}[str(loop.by)]
    if weights.numel() != wanted or (loop.by == "token" and choice.shape[1] != 1):
        raise CaptureError(
            f"the loop over experts at line {loop.line} has choices {list(choice.shape)} and weights {list(weights.shape)}; "
            "what to do: a weight for each choice, weights[token, slot, None]"
        )
    if loop.by == "expert":
        return weights.reshape(-1, experts).gather(1, choice.clamp(0, experts - 1))
    return weights.reshape(choice.shape)


def _replay_tape(tape: Tape, weight: Callable[[str], Tensor], x: Tensor, layout: Layout) -> Tensor:
    rows = layout.to(x)
    groups = rows.shape[:-1]

    def product(function: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        matrices = weight.transpose(1, 2) if function is F.linear else weight
        made = layout.product(_as_linear(input).reshape(*groups, input.shape[-1]), _as_linear(matrices))
        made = made if bias is None else made + layout.bias(_as_linear(bias))
        return own(made.reshape(-1, made.shape[-1]))

    def own(x: Tensor) -> Tensor:
        """A tensor that the tape may change in place: a view of the result of meshc's operators is none."""
        return x.clone() if tape.writes else x

    made = play(tape, own(rows.reshape(-1, rows.shape[-1])), product, weight)
    return made.reshape(*groups, made.shape[-1])


def _as_linear(x: Tensor) -> Tensor:
    """An operand, cast as autocast casts those of `linear`: autocast does not know meshc's operators."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
            return x.to(torch.get_autocast_dtype(device))
    return x


# Recognition of the loop over experts in a module's forward: over modules that it calls, or over rows of stacked weights.


def loop_of(module: nn.Module) -> Loop | None:
    """The loop over experts in a module's forward; None if there is no such loop, or one that is not understood."""
    function = type(module).forward
    if not isinstance(function, FunctionType) or "forward" in module.__dict__ and CALL not in module.__dict__:
        return None
    held = [module, *module.children()]
    lists = any(isinstance(each, nn.ModuleList | nn.ModuleDict) and len(each) > 1 for each in held)
    tree = _tree(function) if lists or stacked_parameters(module) else None
    return None if tree is None else loop_reader.LoopReader(module, function, tree).loop()


@cache
def _tree(function: FunctionType) -> ast.FunctionDef | None:
    """The syntax tree of a plain function, without decorators and free variables, at its lines in its file; None for any other."""
    if function.__code__.co_freevars:
        return None
    try:
        lines, first = inspect.getsourcelines(function)
        found = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    if not isinstance(found, ast.FunctionDef) or found.decorator_list:
        return None
    if any(isinstance(each, ast.Attribute) and each.attr.startswith("__") and not each.attr.endswith("__") for each in ast.walk(found)):
        return None  # private names, which Python mangles by class
    ast.increment_lineno(found, first - 1)
    if not any(isinstance(each, ast.For) for each in found.body):
        return None
    same = _code_key(loop_reader.compile_body(found, found.body, function)) == _code_key(function.__code__)
    return found if same else None  # else the file has changed since the import


def _code_key(code: CodeType) -> object:
    return code.co_names, code.co_varnames, [repr(each) for each in code.co_consts if not isinstance(each, CodeType)]
