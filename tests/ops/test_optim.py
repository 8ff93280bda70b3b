"""Updates as operators, and what `meshc.optimizer` makes of an optimizer, against `torch.optim` itself, step by step in float64."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from meshc.errors import CompileError, InputError, StateError
from meshc.ops import optim as ops
from meshc.optimizer import optimizer as mo

SHAPES = ((4, 3), (6,), (), (2, 3, 2))


def plain_call(op, *args, **kwargs):
    return op(*args, **kwargs)


def in_place_call(op, *args, **kwargs):
    """The in-place twin on copies, in the functional one's clothes."""
    if op not in ops.IN_PLACE:
        return op(*args, **kwargs)
    args = [a.clone() if i in ops.WRITTEN[op] else a for i, a in enumerate(args)]
    ops.IN_PLACE[op](*args, **kwargs)
    written = tuple(args[i] for i in ops.WRITTEN[op])
    return written if len(written) > 1 else written[0]


def many_call(op, *args, **kwargs):
    if op not in ops.MANY:
        return op(*args, **kwargs)
    tensors = max(ops.WRITTEN[op]) + 1 if len(ops.WRITTEN[op]) > 1 else 2
    args = [a.clone() if i in ops.WRITTEN[op] else a for i, a in enumerate(args)]
    ops.MANY[op](*([a] for a in args[:tensors]), *args[tensors:])
    written = tuple(args[i] for i in ops.WRITTEN[op])
    return written if len(written) > 1 else written[0]


def parameters(shapes=SHAPES, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


class Shadow:
    """Steps beside a torch optimizer through `update_nodes`, never reading its state after the start."""

    def __init__(self, optimizer, call=plain_call):
        self.optimizer, self.call = optimizer, call
        self.spec = mo.describe(optimizer)
        self.live = [p for group in optimizer.param_groups for p in group["params"]]
        self.params = [p.detach().clone() for p in self.live]
        self.states = [{slot.name: slot.initial(p) for slot in self.spec.slots_of(p)} for p in self.live]

    def step(self, skip=()):
        if self.spec.key_of(self.optimizer) != self.spec.key:
            self.spec = mo.describe(self.optimizer)
        numbers = [{k: torch.tensor(v, dtype=torch.float64) for k, v in group.items()} for group in mo.numbers(self.optimizer)]
        for i, p in enumerate(self.live):
            if i in skip:
                continue
            group = self.spec.group_of(p)
            self.params[i], self.states[i] = mo.update_nodes(
                group, self.params[i], p.grad.clone(), self.states[i], numbers[group.index], self.call, like=p
            )

    def check(self, tolerance=1e-12):
        for i, p in enumerate(self.live):
            close(self.params[i], p.detach(), tolerance)
            for name, value in self.optimizer.state.get(p, {}).items():
                if value is not None:
                    value = value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
                    assert self.states[i][name].dtype == value.dtype, name
                    close(self.states[i][name], value, tolerance)


def close(a, b, tolerance):
    assert a.shape == b.shape and a.dtype == b.dtype
    scale = max(b.abs().max().item(), 1e-300) if b.numel() else 1.0
    assert b.numel() == 0 or (a - b).abs().max().item() <= tolerance * scale


def run(optimizer, steps=5, call=plain_call, change=lambda k: None, skip=lambda k: (), tolerance=1e-12):
    shadow = Shadow(optimizer, call)
    generator = torch.Generator().manual_seed(1)
    for k in range(steps):
        for i, p in enumerate(shadow.live):
            gradient = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
            p.grad = None if i in skip(k) else gradient
        change(k)
        shadow.step(skip(k))
        optimizer.step()
        shadow.check(tolerance)
    return shadow


OPERATORS = [
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True, "maximize": True, "betas": (0.5, 0.7), "eps": 1e-3}),
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.AdamW, {"amsgrad": True, "weight_decay": 0.3, "lr": torch.tensor(0.05, dtype=torch.float64)}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.4}),
]


@pytest.mark.parametrize("call", [plain_call, in_place_call, many_call])
@pytest.mark.parametrize("kind, options", OPERATORS)
def test_operator_equals_torch(kind, options, call):
    options = copy.deepcopy(options)
    spec = run(kind(parameters(), **options), call=call).spec
    assert {group.kind for group in spec.groups} == {kind.__name__.lower()}


@pytest.mark.parametrize("kind, options", OPERATORS)
def test_lists_in_one_call(kind, options):
    """All parameters in one list, with gradients whose memory is laid out otherwise (a fused kernel would misread them)."""
    optimizer = kind(parameters(((4, 3), (5, 2), (0, 3), (3,))), **copy.deepcopy(options))
    shadow = Shadow(optimizer)
    (group,) = shadow.spec.groups
    recorded: list[tuple] = []
    numbers = {k: torch.tensor(v, dtype=torch.float64) for k, v in mo.numbers(optimizer)[0].items()}

    def record(op, *args):
        if op in ops.MANY:
            recorded.append((op, args))
            return tuple(args[i] for i in ops.WRITTEN[op]) if len(ops.WRITTEN[op]) > 1 else args[0]
        return op(*args)

    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        recorded.clear()
        for i, p in enumerate(shadow.live):
            gradient = torch.randn(p.shape[::-1], generator=generator, dtype=torch.float64)
            p.grad = gradient.T.contiguous() if p.dim() == 2 else gradient
            mo.update_nodes(group, shadow.params[i], gradient.T if p.dim() == 2 else gradient, shadow.states[i], numbers, record)
        op = recorded[0][0]
        tensors = max(ops.WRITTEN[op]) + 1 if len(ops.WRITTEN[op]) > 1 else 2
        columns = [[args[i] for _, args in recorded] for i in range(tensors)]
        ops.MANY[op](*columns, *recorded[0][1][tensors:])
        optimizer.step()
        shadow.check()


def test_parameter_that_is_not_dense_takes_the_plain_update():
    whole = torch.arange(24, dtype=torch.float64).reshape(4, 6)
    part, reference = whole[:, ::2], whole[:, ::2].clone()
    grad = torch.ones_like(reference)
    lr, decay = torch.tensor(0.5, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    torch.ops.meshc.sgd_plain_(part, grad, lr, decay, False)
    assert torch.equal(part, reference - 0.5)
    assert torch.equal(whole[:, 1::2], torch.arange(24, dtype=torch.float64).reshape(4, 6)[:, 1::2])


def test_adam_by_hand():
    """First step from zero: both bias corrections cancel, so the parameter moves by lr * g / (|g| + eps)."""
    number = lambda value: torch.tensor(value, dtype=torch.float64)  # noqa: E731
    param, grad, zero = number([1.0, 2.0]), number([4.0, -2.0]), number([0.0, 0.0])
    result = torch.ops.meshc.adam(
        param, grad, zero, zero, torch.tensor(0.0), *map(number, (0.1, 0.9, 0.99, 0.0, 0.5)), decoupled=True, maximize=False
    )
    assert torch.allclose(result[0], number([1.0 * (1 - 0.05) - 0.1, 2.0 * (1 - 0.05) + 0.1]), rtol=1e-14)
    assert torch.allclose(result[1], number([0.4, -0.2])) and torch.allclose(result[2], number([0.16, 0.04]))
    assert result[3].item() == 1.0 and torch.equal(param, number([1.0, 2.0]))


@pytest.mark.parametrize("name", ["adam", "adam_amsgrad", "sgd", "sgd_plain"])
def test_registration(name):
    operands = max(ops.WRITTEN[getattr(torch.ops.meshc, name).default]) + 1 if name != "sgd_plain" else 2
    like_param = [torch.rand(3, 2) for _ in range(operands - (0 if name == "sgd_plain" else 1))]
    scalar = [] if name == "sgd_plain" else [torch.tensor(1.0)]
    count = {"adam": 5, "adam_amsgrad": 5, "sgd": 4, "sgd_plain": 2}[name]
    flags = (False,) if name == "sgd_plain" else (False, False)
    args = (*like_param, *scalar, *(torch.tensor(0.5, dtype=torch.float64) for _ in range(count)), *flags)
    utilities = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.meshc, name).default, args, test_utils=utilities)
    torch.library.opcheck(getattr(torch.ops.meshc, f"{name}_").default, args, test_utils=utilities)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_lower_precision(dtype, tolerance):
    run(torch.optim.AdamW(parameters(dtype=dtype), weight_decay=0.1), call=many_call, tolerance=tolerance)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_sgd_of_half_precision_updates_all_of_a_parameter(dtype, tolerance, momentum):
    """torch's fused kernel leaves all but the last few elements as they were."""
    run(torch.optim.SGD(parameters(((8, 9), (40,)), dtype), lr=0.1, momentum=momentum), call=many_call, tolerance=tolerance)


def test_complex_adam():
    values = torch.complex(torch.randn(3, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64))
    mine, theirs = values.clone(), Parameter(values.clone())
    optimizer = torch.optim.Adam([theirs], lr=0.1)
    shadow = Shadow(optimizer, many_call)
    for _ in range(3):
        theirs.grad = torch.complex(torch.randn(3, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64))
        shadow.step()
        optimizer.step()
        shadow.check()
    assert not torch.equal(mine, theirs.detach())


def test_schedule_and_groups_without_recompiling():
    first, second = parameters()[:2], parameters()[2:]
    groups = [{"params": first, "lr": 0.1}, {"params": second, "lr": 0.01, "weight_decay": 0.3, "betas": (0.5, 0.6)}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda k: 1 / (k + 1), lambda k: 0.9**k])
    spec = mo.describe(optimizer)

    def change(k):
        if k:
            scheduler.step()
        optimizer.param_groups[1]["betas"] = (0.5 + 0.05 * k, 0.6)
        assert spec.key_of(optimizer) == spec.key

    mo.mark_stepped(optimizer)
    run(optimizer, change=change)
    assert mo.numbers(optimizer)[1] == {
        "lr": pytest.approx(0.01 * 0.9**4),
        "beta1": 0.7,
        "beta2": 0.6,
        "eps": 1e-8,
        "weight_decay": 0.3,
    }


def test_flag_that_changes_is_named():
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    spec = mo.describe(optimizer)
    optimizer.param_groups[0]["lr"] = 0.2
    assert spec.key_of(optimizer) == spec.key
    optimizer.param_groups[0]["weight_decay"] = 0.1
    optimizer.param_groups[0]["momentum"] = 0.9
    assert mo.changes(spec.key, spec.key_of(optimizer)) == ["group 0: momentum: False -> True", "group 0: weight_decay != 0: False -> True"]
    assert mo.key(optimizer) == spec.key_of(optimizer)


@pytest.mark.parametrize("kind, options", OPERATORS)
def test_resumed_state(kind, options):
    optimizer = kind(parameters(), **copy.deepcopy(options))
    for _ in range(2):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p) * 0.3
        optimizer.step()
    fresh = kind([Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]], **copy.deepcopy(options))
    fresh.load_state_dict(optimizer.state_dict())
    run(fresh, steps=3)


@pytest.mark.parametrize("kind, options", [OPERATORS[3], OPERATORS[9], (torch.optim.RAdam, {})])
def test_parameter_without_gradient(kind, options):
    """Skipped at steps 0 and 2, as torch does: no decay, no count, and its first step comes later."""
    run(kind(parameters(), **copy.deepcopy(options)), skip=lambda k: (1, 3) if k in (0, 2) else ())


def test_slots_are_fresh_and_the_optimizer_untouched():
    optimizer = torch.optim.AdamW(parameters(), amsgrad=True)
    spec = mo.describe(optimizer)
    assert len(optimizer.state) == 0
    slots = {slot.name: slot for slot in spec.slots_of(optimizer.param_groups[0]["params"][0])}
    assert {name: slot.shape for name, slot in slots.items()} == {
        "step": "scalar",
        "exp_avg": "like_param",
        "exp_avg_sq": "like_param",
        "max_exp_avg_sq": "like_param",
    }
    assert slots["step"].dtype == torch.float32 and slots["step"].fill == 0.0 and slots["exp_avg"].size == (4, 3)
    scalar = {slot.name: slot.shape for slot in spec.slots_of(optimizer.param_groups[0]["params"][2])}
    assert scalar["step"] == "scalar" and scalar["exp_avg"] == "like_param"
    with pytest.raises(StateError, match="none of its 1 groups"):
        spec.slots_of(Parameter(torch.zeros(2)))


TRACED = [
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.05, "weight_decay": 0.1, "initial_accumulator_value": 0.3}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    (torch.optim.RMSprop, {"maximize": True}),
    (torch.optim.Adadelta, {"lr": 0.5, "weight_decay": 0.1}),
    (torch.optim.Adamax, {"weight_decay": 0.1, "betas": (0.5, 0.8)}),
    (torch.optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (torch.optim.NAdam, {"weight_decay": 0.1, "maximize": True}),
    (torch.optim.RAdam, {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.1}),
    (torch.optim.RAdam, {"lr": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.1, "capturable": True}),
    (torch.optim.ASGD, {"lr": 0.1, "t0": 2, "weight_decay": 0.1}),
    (torch.optim.ASGD, {"lr": 0.1, "t0": 2.0, "lambd": 0.1}),
    (torch.optim.Rprop, {"lr": 0.05, "etas": (0.3, 1.4), "step_sizes": (1e-3, 0.2)}),
    (torch.optim.Adafactor, {"lr": 0.3, "weight_decay": 0.1}),
    (torch.optim.Muon, {"lr": 0.1}),
]


@pytest.mark.parametrize("kind, options", TRACED)
def test_traced_equals_torch(kind, options):
    """Seven steps (RAdam's rectification starts at the sixth) under a schedule that never compiles again, starting after `describe`."""
    shapes = SHAPES[:1] if kind is torch.optim.Muon else SHAPES[:2]
    optimizer = kind(parameters(shapes), **{k: v for k, v in options.items() if k != "capturable"})
    if options.get("capturable"):  # torch asserts that such a step runs on a GPU: describe one, step the other
        optimizer.param_groups[0]["capturable"] = True
        mo.describe(optimizer)
        optimizer.param_groups[0]["capturable"] = False
    spec = mo.describe(optimizer)

    def change(k):
        optimizer.param_groups[0]["lr"] *= 0.8
        assert spec.key_of(optimizer) == spec.key

    shadow = run(optimizer, steps=7, change=change)
    assert shadow.spec.groups[0].kind == "other"


def test_traced_update_has_names_and_only_tensor_operators():
    optimizer = torch.optim.RAdam(parameters(((4, 3),)), lr=0.1)
    (update,) = mo.describe(optimizer).groups[0].traced.values()
    names = [node.name for node in update.graph.graph.nodes if node.op == "placeholder"]
    assert names == [
        "param",
        "grad",
        "state_step",
        "state_exp_avg",
        "state_exp_avg_sq",
        "number_lr",
        "number_betas_0",
        "number_betas_1",
        "number_eps",
        "number_weight_decay",
    ]
    assert update.outputs == ("param", "state:step", "state:exp_avg", "state:exp_avg_sq")
    targets = [node.target for node in update.graph.graph.nodes if node.op == "call_function"]
    assert all(isinstance(target, torch._ops.OpOverload) and target.namespace == "aten" for target in targets)
    assert not any("_local_scalar_dense" in str(target) or target._schema.is_mutable for target in targets)
    full_size_selects = [n for n in update.graph.graph.nodes if n.target is torch.ops.aten.where.self and n.meta["val"].dim() > 0]
    assert len(full_size_selects) == 1  # one branch on the step count, joined once


def test_branch_on_a_number_is_a_guard():
    optimizer = torch.optim.RMSprop(parameters(), lr=0.1)
    spec = mo.describe(optimizer)
    optimizer.param_groups[0]["alpha"] = 0.5
    assert spec.key_of(optimizer) == spec.key
    optimizer.param_groups[0]["weight_decay"] = 0.25
    assert mo.changes(spec.key, spec.key_of(optimizer)) == ["group 0: weight_decay != 0: False -> True"]


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                m, g = state["exp_avg"], p.grad
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(m.mul(beta1).add(g, alpha=1 - beta1)), alpha=-group["lr"])
                m.mul_(beta2).add_(g, alpha=1 - beta2)


class HandAdam(torch.optim.Optimizer):
    """As people write it: an int count in the state, warm-up by a branch, a copy of the parameter, torch._foreach."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas, "slow": 0.5})

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    if not state:
                        state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p), anchor=p.detach().clone())
                    state["step"] += 1
                    torch._foreach_lerp_([state["m"]], [p.grad], 1 - group["betas"][0])
                    state["v"].mul_(group["betas"][1]).addcmul_(p.grad, p.grad.conj(), value=1 - group["betas"][1])
                    rate = group["lr"] * min(1.0, state["step"] / 4) / (1 - group["betas"][0] ** state["step"])
                    if state["step"] > 2:
                        p.addcdiv_(state["m"], state["v"].sqrt().add_(1e-8), value=-rate)
                    else:
                        p.add_(state["m"].sign(), alpha=-rate)
                    if state["step"] % 3 == 0:
                        state["anchor"].lerp_(p, group["slow"])
                        p.copy_(state["anchor"])


class OldMomentum(torch.optim.Optimizer):
    """State made from the first gradient."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    buffer = state["momentum_buffer"] = torch.clone(p.grad).detach()
                else:
                    buffer = state["momentum_buffer"]
                    buffer.mul_(0.9).add_(p.grad, alpha=0.5)
                p.add_(buffer, alpha=-group["lr"])


@pytest.mark.parametrize("kind", [Lion, HandAdam, OldMomentum])
def test_users_own_class(kind):
    optimizer = kind(parameters())
    before = copy.deepcopy(optimizer.state_dict())
    spec = mo.describe(optimizer)
    assert str(optimizer.state_dict()) == str(before)

    def change(k):
        optimizer.param_groups[0]["lr"] *= 0.8
        assert spec.key_of(optimizer) == spec.key

    run(optimizer, steps=7, change=change)


def test_resumed_traced_state():
    for kind in (torch.optim.Rprop, torch.optim.ASGD, HandAdam, OldMomentum):
        optimizer = kind(parameters(SHAPES[:2]), lr=0.05)
        for _ in range(2):
            for p in optimizer.param_groups[0]["params"]:
                p.grad = torch.ones_like(p) * 0.3
            optimizer.step()
        run(optimizer, steps=4)


class BakesRoot(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            p.add_(p.grad, alpha=-0.1 / math.sqrt(state["step"]))


class CountsInGroup(BakesRoot):
    def step(self):
        with torch.no_grad():
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
                for p in group["params"]:
                    p.add_(p.grad, alpha=-group["lr"] / group["k"])


class CountsInSelf(BakesRoot):
    _count = 0

    def step(self):
        with torch.no_grad():
            self._count += 1
            for p in self.param_groups[0]["params"]:
                p.add_(p.grad, alpha=-0.1 / self._count)


class Couples(BakesRoot):
    @torch.no_grad()
    def step(self):
        params = self.param_groups[0]["params"]
        norm = sum(p.grad.square().sum() for p in params) ** 0.5
        for p in params:
            p.sub_(p.grad / norm)


class NeedsClosure(BakesRoot):
    def step(self, closure):
        closure()


@pytest.mark.parametrize(
    "kind, words",
    [
        (torch.optim.LBFGS, "LBFGS evaluates the model several times"),
        (torch.optim.SparseAdam, "SparseAdam takes sparse gradients"),
        (NeedsClosure, r"NeedsClosure.step needs closure"),
        (BakesRoot, r"BakesRoot.step uses float\(\) on a value that changes from step to step"),
        (CountsInGroup, r"CountsInGroup.step changes group\['k'\]"),
        (CountsInSelf, r"CountsInSelf.step changes self._count"),
        (Couples, "Couples: after three steps on small tensors its traced update differs"),
    ],
)
def test_refused(kind, words):
    optimizer = kind(parameters(SHAPES[:2]))
    with pytest.raises(CompileError, match=words):
        mo.describe(optimizer)
    assert not optimizer.state or kind is torch.optim.LBFGS


def test_sparse_gradient_is_refused():
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(CompileError, match="parameter 0 of group 0 has a sparse gradient"):
        mo.describe(torch.optim.SGD(embedding.parameters(), lr=0.1))


def test_untraced_shape_is_refused():
    (group,) = mo.describe(torch.optim.RMSprop(parameters())).groups
    value = torch.zeros(9, 9, dtype=torch.float64)
    with pytest.raises(InputError, match=r"no update was traced for a parameter of shape \(9, 9\)"):
        mo.update_nodes(group, value, value, {}, {}, plain_call)


def test_hooks_and_wrapped_steps_do_not_run():
    optimizer = Lion(parameters())
    optimizer.register_step_pre_hook(lambda *a: pytest.fail("a hook ran"))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    mo.describe(optimizer)
    assert not optimizer.state and not getattr(optimizer, "_opt_called", False)


def test_attach_state():
    old = parameters()
    optimizer = torch.optim.AdamW([{"params": old[:2], "lr": 0.1, "note": "kept"}, {"params": old[2:]}])
    spec = mo.describe(optimizer)
    new = [Parameter(p.detach() + 1) for p in old]
    states = {p: {slot.name: slot.initial(p) for slot in spec.slots_of(p)} for p in old[:3]}
    lists = [group["params"] for group in optimizer.param_groups]
    mo.attach_state(optimizer, dict(zip(old, new, strict=True)), states)
    assert [group["params"] for group in optimizer.param_groups] == [new[:2], new[2:]]
    assert all(group["params"] is held for group, held in zip(optimizer.param_groups, lists, strict=True))
    assert optimizer.param_groups[0]["note"] == "kept"
    assert set(map(id, optimizer.state)) == set(map(id, new[:3])) and optimizer.state[new[0]]["exp_avg"] is states[old[0]]["exp_avg"]
    for p in new:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[new[3]]["step"].item() == 1.0
    with pytest.raises(StateError, match="1 parameters .* are not in its groups"):
        mo.attach_state(optimizer, {old[0]: new[0]}, {})


def test_attached_state_has_torchs_layout():
    optimizer = torch.optim.SGD(parameters(), lr=0.1, momentum=0.9)
    spec = mo.describe(optimizer)
    params = optimizer.param_groups[0]["params"]
    names = [slot.name for slot in spec.slots_of(params[0])]
    assert names == ["momentum_buffer", mo.FIRST]
    mo.attach_state(optimizer, {}, {p: {slot.name: slot.initial(p) for slot in spec.slots_of(p)} for p in params})
    assert {name for state in optimizer.state.values() for name in state} == {"momentum_buffer"}


def test_schedulers_do_not_warn_after_a_compiled_step():
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    mo.mark_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    unmarked = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(parameters(), lr=0.1), 1)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        unmarked.step()
