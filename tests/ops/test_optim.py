"""Updates as operators, and what `meshc.optimizer` makes of an optimizer, against `torch.optim` itself, step by step in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import Parameter

from meshc.errors import StateError
from meshc.ops import optim as ops
from meshc.optimizer import optimizer as mo
from tests.optimizer.stepped import Shadow, parameters, plain_call, run


def many_call(op, *args, **kwargs):
    """The in-place twin on copies, in the functional one's clothes."""
    if op not in ops.MANY:
        return op(*args, **kwargs)
    tensors = max(ops.WRITTEN[op]) + 1 if len(ops.WRITTEN[op]) > 1 else 2
    args = [a.clone() if i in ops.WRITTEN[op] else a for i, a in enumerate(args)]
    ops.MANY[op](*([a] for a in args[:tensors]), *args[tensors:])
    written = tuple(args[i] for i in ops.WRITTEN[op])
    return written if len(written) > 1 else written[0]


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


@pytest.mark.parametrize("call", [plain_call, many_call])
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
    torch.ops.meshc.sgd_plain_many_([part], [grad], lr, decay, False)
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
    lists = (*([one] for one in (*like_param, *scalar)), *args[len(like_param) + len(scalar) :])
    torch.library.opcheck(getattr(torch.ops.meshc, f"{name}_many_").default, lists, test_utils=utilities)


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
    assert mo.describe(optimizer).key == spec.key_of(optimizer)


def _tensor_decay(optimizer: torch.optim.Optimizer, decay: list) -> None:
    decay[0].fill_(0.1)


def _other_list(optimizer: torch.optim.Optimizer, decay: list) -> None:
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:1]


def _shorter_list(optimizer: torch.optim.Optimizer, decay: list) -> None:
    optimizer.param_groups[0]["params"].pop()


def _new_group(optimizer: torch.optim.Optimizer, decay: list) -> None:
    optimizer.add_param_group({"params": parameters()})


def _other_class(optimizer: torch.optim.Optimizer, decay: list) -> None:
    optimizer.__class__ = type("Mine", (torch.optim.SGD,), {})


@pytest.mark.parametrize("change", [_tensor_decay, _other_list, _shorter_list, _new_group, _other_class])
@pytest.mark.parametrize("tensor", [False, True])
def test_the_key_of_groups_is_read_again_whatever_changes(change, tensor):
    decay = [torch.zeros(()) if tensor else 0.0]
    optimizer = torch.optim.SGD(parameters(), lr=0.1, weight_decay=decay[0])
    spec = mo.describe(optimizer)
    first = spec.key_of(optimizer)
    assert first == spec.key and (spec.key_of(optimizer) is first) == (not tensor)  # nothing is read twice
    if tensor or change is not _tensor_decay:
        change(optimizer, decay)
        assert spec.key_of(optimizer) == mo.guarded_key(optimizer, [group.guards for group in spec.groups]) != first


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
