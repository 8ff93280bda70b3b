"""A compiled module where torch's own tools take modules, and what goes around one and is refused. Each function is a row."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.experimental import implicit_replication
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import clip_grad_norm_, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint

import meshc
from tests.frameworks.rows import Rows, refuses, same, same_parameters
from tests.processes.session import run_checks

ROWS = Rows("torch")
X = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(6, 8)


def mlp(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), *between, nn.ReLU(), nn.Linear(16, 4)).double()


def compiled(mesh: Any, *between: nn.Module) -> tuple[Any, Any, Any]:
    """A model, the same on one device, and the program."""
    model = mlp(*between)
    twin = copy.deepcopy(model)
    return model, twin, meshc.compile(model, mesh, args=(X,))


def trained(models: Sequence[nn.Module], steps: int, behind: Callable[[nn.Module], object] | None = None, **adamw: Any) -> None:
    """Some steps of each, by the loop that everybody writes; `behind` each step."""
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **adamw)
        for _ in range(steps):
            optimizer.zero_grad()
            model(X).square().sum().backward()
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if behind is not None:
                behind(model)


@ROWS.row("a loop of one's own: isinstance, named_parameters, .to, .train, .eval, clip_grad_norm_, optimizers")
def a_loop(mesh: Any) -> None:
    model, twin, program = compiled(mesh)
    assert isinstance(model, nn.Sequential) and [*dict(model.named_parameters())] == [*dict(twin.named_parameters())]
    assert model.to("cpu").to(torch.float64).eval().train() is model
    trained((model, twin), 3)
    same_parameters(model, twin)
    same(model(X), twin(X))
    assert repr(model) == repr(twin)
    assert repr(program).startswith("<meshc.Program of Sequential on tp=2, global inputs, plan ")
    assert "<strong>Sequential<" in program._repr_html_()


@ROWS.row("modules of it called by themselves: an encoder, a head, a slice of a Sequential, with gradients")
def its_modules(mesh: Any) -> None:
    model, twin, _ = compiled(mesh)
    for one in (model, twin):
        one[2](one[:2](X)).square().sum().backward()
    same(model[2](model[0](X)), twin[2](twin[0](X)))
    for parameter, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        same(parameter.grad, theirs.grad)


@ROWS.row("state dicts of plain models: model.load_state_dict(whole tensors), assign=True, inside a larger model")
def plain_state(mesh: Any) -> None:
    model, twin, _ = compiled(mesh)
    other = nn.Sequential(mlp(), nn.Linear(4, 2).double())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    model.load_state_dict(other[0].state_dict())
    same(model(X), other[0](X))
    model.load_state_dict(twin.state_dict(), assign=True)
    same(model(X), twin(X))
    nn.Sequential(model, nn.Linear(4, 2).double()).load_state_dict(other.state_dict())
    same(model(X), other[0](X))


@ROWS.row("AveragedModel (EMA, SWA) made after compiling, evaluated", line="meshc.compile(averaged, mesh, args=...)")
def averaged_after(mesh: Any) -> None:
    models = compiled(mesh)[:2]
    averages = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for model in models]
    trained(models, 2, lambda model: averages[model is models[1]].update_parameters(model))
    refuses(meshc.StateError, "a copy of a compiled module", lambda: averages[0](X))
    meshc.compile(averages[0], mesh, args=(X,))
    same(averages[0](X), averages[1](X))
    trained(models, 2, lambda model: averages[model is models[1]].update_parameters(model))
    same(averages[0](X), averages[1](X))
    assert int(averages[0].n_averaged) == 4


@ROWS.row("AveragedModel made before compiling", line="meshc.compile(averaged, mesh, args=...)")
def averaged_before(mesh: Any) -> None:
    model = mlp()
    twin = copy.deepcopy(model)
    averages = [AveragedModel(model), AveragedModel(twin)]
    meshc.compile(model, mesh, args=(X,))
    meshc.compile(averages[0], mesh, args=(X,))
    trained((model, twin), 3, lambda one: averages[one is twin].update_parameters(one))
    same_parameters(*averages)
    same(averages[0](X), averages[1](X))


class Shadows:
    """Averages as diffusers' EMAModel keeps them: a list of tensors, which for an evaluation go into the model, and out again."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.shadows = [parameter.clone().detach() for parameter in parameters]

    @torch.no_grad()
    def step(self, parameters: Iterable[nn.Parameter]) -> None:
        for shadow, parameter in zip(self.shadows, parameters, strict=True):
            shadow.sub_(0.1 * (shadow - parameter))

    @torch.no_grad()
    def swap(self, parameters: Iterable[nn.Parameter]) -> None:
        for shadow, parameter in zip(self.shadows, parameters, strict=True):
            kept = parameter.detach().clone()
            parameter.data.copy_(shadow.data)
            shadow.copy_(kept)


@ROWS.row("lists of averaged tensors (diffusers' EMAModel), made before compiling too: those are whole on each rank")
def averaged_tensors(mesh: Any) -> None:
    for before in (True, False):
        model = mlp()
        models = model, copy.deepcopy(model)
        averages = [Shadows(one.parameters()) for one in models]
        meshc.compile(model, mesh, args=(X,))
        averages[0] = averages[0] if before else Shadows(model.parameters())
        _averaged_tensors(models, averages)


def _averaged_tensors(models: Sequence[nn.Module], averages: Sequence[Shadows]) -> None:
    trained(models, 3, lambda model: averages[model is models[1]].step(model.parameters()))
    for _ in range(2):
        for model, average in zip(models, averages, strict=True):
            average.swap(model.parameters())
        same(models[0](X), models[1](X))


class AveragedCopy(nn.Module):
    """An average as timm's ModelEmaV2 and V3 keep it: a copy of the module, whose values are written one by one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model).eval()

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for average, value in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            average.lerp_(value, 0.1) if value.is_floating_point() else average.copy_(value)


@ROWS.row("averaged copies of the module (timm's --model-ema), made before compiling too", line="meshc.compile(ema.module, mesh, args=...)")
def averaged_copies(mesh: Any) -> None:
    for before in (True, False):
        model = mlp(nn.BatchNorm1d(16))
        twin = copy.deepcopy(model)
        averages = [AveragedCopy(one).double() for one in (model, twin)]
        meshc.compile(model, mesh, args=(X,))
        averages[0] = averages[0] if before else AveragedCopy(model)
        meshc.compile(averages[0].module, mesh, args=(X,))
        for one, average in zip((model, twin), averages, strict=True):
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                one(X).square().sum().backward()
                optimizer.step()
                average.update(one)
        same(averages[0].module(X), averages[1].module(X))


@ROWS.row("an average beside a TrainStep, whose storage may be no layout of torch's", line="program.sync() before update_parameters")
def averaged_beside_a_step(mesh: Any) -> None:
    model = mlp()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, twin)]
    program = meshc.compile(meshc.TrainStep(model, optimizer=optimizers[0], loss=lambda y: y.square().sum()), mesh, args=(X,))
    averages = [AveragedModel(model), AveragedModel(twin)]
    for _ in range(3):
        program(X)
        program.sync()
        averages[0].update_parameters(model)
        optimizers[1].zero_grad()
        twin(X).square().sum().backward()
        optimizers[1].step()
        averages[1].update_parameters(twin)
    meshc.compile(averages[0], mesh, args=(X,))
    same(averages[0](X), averages[1](X))


@ROWS.row("update_bn after averaging")
def batch_norm_updated(mesh: Any) -> None:
    """Its `momentum=None` makes a factor of a counter in Python; a momentum that is set between calls counts."""
    model, twin, _ = compiled(mesh, nn.BatchNorm1d(16))
    for momentum in (0.1, 0.5):
        model[1].momentum = twin[1].momentum = momentum
        same(model(X * momentum), twin(X * momentum))
        same(model[1].running_mean, twin[1].running_mean)
    for one in (model, twin):
        update_bn([X, X + 1, X * 3], one)
    for name, buffer in model[1].named_buffers():
        same(buffer, dict(twin[1].named_buffers())[name])
    assert model[1].num_batches_tracked == 3 and model[1].momentum == 0.5
    same(model.eval()(X), twin.eval()(X))


@ROWS.row(
    "a compiled backbone and a plain head: clip_grad_norm_, optimizers (foreach, fused too), EMA over both",
    line="with torch.distributed.tensor.experimental.implicit_replication():",
)
def mixed(mesh: Any) -> None:
    backbone, twin, _ = compiled(mesh)
    head = nn.Linear(4, 2).double()
    models = nn.Sequential(backbone, head), nn.Sequential(twin, copy.deepcopy(head))
    with implicit_replication():
        averages = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for model in models]
        for adamw in ({}, {"foreach": True}, {"fused": True}):
            trained(models, 2, lambda model: averages[model is models[1]].update_parameters(model), **adamw)
    same_parameters(*models)
    same(models[0](X), models[1](X))
    meshc.compile(averages[0].module[0], mesh, args=(X,))
    same(averages[0](X), averages[1](X))


@ROWS.row("torch.utils.checkpoint around it, hooks on gradients of parameters, forward hooks on its modules")
def around_a_call(mesh: Any) -> None:
    model, twin, _ = compiled(mesh)
    given = [X.clone().requires_grad_() for _ in range(2)]
    for one, x in zip((model, twin), given, strict=True):
        checkpoint(one, x, use_reentrant=False).square().sum().backward()
        one[0].weight.register_hook(lambda gradient: gradient * 2)
        one[2].register_forward_hook(lambda module, args, output: output * 3)
        one(x).square().sum().backward()
    same(given[0].grad, given[1].grad)
    for name, parameter in model.named_parameters():
        same(parameter.grad, dict(twin.named_parameters())[name].grad)


@ROWS.row("forward replaced on the instance, as wrappers of mixed precision do")
def forward_replaced(mesh: Any) -> None:
    model, twin, _ = compiled(mesh)
    own = model.forward
    model.forward = lambda *args, **kwargs: own(*args, **kwargs) * 3
    same(model(X), twin(X) * 3)
    del model.forward
    same(model(X), twin(X))


@ROWS.row("DataParallel on one device")
def data_parallel(mesh: Any) -> None:
    model, twin, _ = compiled(mesh)
    same(nn.DataParallel(model)(X), twin(X))


# ----------------------------------------------------------------------------------------------------------------------- refused


@ROWS.row("DistributedDataParallel around it", refused="leave it out: gradients are reduced by the program")
def ddp(mesh: Any) -> None:
    model, _, _ = compiled(mesh)
    refuses(RuntimeError, "doesn't have any parameter that requires a gradient", lambda: nn.parallel.DistributedDataParallel(model))


@ROWS.row("calls of a copy.deepcopy", refused="compile the copy, which begins with the values that it holds")
def deep_copy(mesh: Any) -> None:
    model, twin, _ = compiled(mesh)
    second = copy.deepcopy(model)
    refuses(meshc.StateError, "a copy of a compiled module", lambda: second(X))
    meshc.compile(second, mesh, args=(X,))
    trained((second,), 1)
    same(model(X), twin(X))
    trained((twin,), 1)
    same(second(X), twin(X))


@ROWS.row("pickle, torch.save of the module itself", refused="program.save_pretrained, program.state_dict(full=True), or DCP")
def pickled(mesh: Any) -> None:
    model, _, program = compiled(mesh)
    for save in (lambda: pickle.dumps(model), lambda: torch.save(model, io.BytesIO())):
        refuses(meshc.StateError, "a compiled module is not pickled", save)
    refuses(meshc.StateError, "neither pickled nor copied", lambda: pickle.dumps(program))


@ROWS.row("create_graph=True (second derivatives)", refused="take the gradient within forward or a step's loss, by torch.autograd.grad")
def create_graph(mesh: Any) -> None:
    model, _, _ = compiled(mesh)
    refuses(meshc.StateError, "create_graph=True", lambda: model(X).sum().backward(create_graph=True))


@ROWS.row("torch.func: vmap, grad, jvp, jacrev", refused="apply it to a function of the plain model, and compile that")
def transforms(mesh: Any) -> None:
    model, _, _ = compiled(mesh)
    for call in (lambda: torch.vmap(model)(X), lambda: torch.func.jacrev(model)(X), lambda: torch.func.jvp(model, (X,), (X,))):
        refuses(meshc.StateError, "a transform of torch.func", call)


@ROWS.row("forward-mode derivatives (torch.autograd.forward_ad)", refused="use backward")
def forward_mode(mesh: Any) -> None:
    model, _, _ = compiled(mesh)
    with torch.no_grad():
        model(X)
    with torch.autograd.forward_ad.dual_level():
        refuses(meshc.StateError, "has a tangent", lambda: model(torch.autograd.forward_ad.make_dual(X, X)))


@ROWS.row("torch.func.functional_call with other tensors", refused="load_state_dict; or compile a function that takes them")
def functional(mesh: Any) -> None:
    model, twin, _ = compiled(mesh)
    same(functional_call(model, dict(model.named_parameters()), (X,)), twin(X))
    others = [{name: p.detach() * 2 for name, p in model.named_parameters()}]
    others += [{name: nn.Parameter(p.detach() * 2) for name, p in model.named_parameters()}]
    for values in others:
        refuses(meshc.StateError, "torch.func.functional_call", lambda values=values: functional_call(model, values, (X,)))  # type: ignore[misc]
    same(model(X), twin(X))


@ROWS.row("torch.compile around it", refused='backend="inductor" of meshc.compile')
def torch_compile(mesh: Any) -> None:
    model, _, _ = compiled(mesh)
    refuses(meshc.StateError, "leave torch.compile out", lambda: torch.compile(model, backend="eager")(X))


@ROWS.row("torch.export, torch.jit.trace of it", refused="program.save(path) stores the program")
def traced(mesh: Any) -> None:
    model, _, _ = compiled(mesh)
    refuses(meshc.StateError, "torch.jit.trace is around this call", lambda: torch.jit.trace(model, (X,)))
    refuses(meshc.StateError, "make_fx", lambda: make_fx(model)(X))
    refuses(meshc.StateError, "torch.export", lambda: torch.export.export(model, (X,), strict=False))


@ROWS.row("backward hooks on its modules", refused="hooks on parameters work")
def backward_hooks(mesh: Any) -> None:
    model, twin, _ = compiled(mesh)
    handle = model[0].register_full_backward_hook(lambda module, inputs, outputs: None)
    refuses(meshc.CaptureError, "take hooks of whole modules", lambda: model(X))
    handle.remove()
    same(model(X), twin(X))


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@ROWS.row("parametrizations, adapters, new modules put into it after compiling", refused="change the model before meshc.compile")
def parametrized(mesh: Any) -> None:
    model, _, _ = compiled(mesh)
    parametrize.register_parametrization(model[0], "weight", Twice())
    refuses(meshc.StateError, "were put into the model after it was compiled", lambda: model(X))


@ROWS.row("fully_shard on it", refused='leave it out: plan="fsdp" stores parameters as it does')
def sharded(mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    model, _, _ = compiled(mesh)
    refuses(TypeError, "Invariant encountered", lambda: fully_shard(model))


@ROWS.row("a batch that is dealt out to ranks that share a part of it", refused="deal out by the data axes alone", mesh="dp=1,tp=2")
def dealt_out_too_far(mesh: Any) -> None:
    model = mlp()
    meshc.compile(model, mesh, args=(X,), inputs="local", options=meshc.Options(local_inputs=meshc.LocalInputs(loss="mean")))
    model(X)
    refuses(meshc.InputError, "the same part of the batch", lambda: model(X + mesh.get_coordinate()[1]))


@ROWS.row("SyncBatchNorm.convert_sync_batchnorm before compiling: the batch norm of one device", mesh="dp=2")
def synced(mesh: Any) -> None:
    twin = mlp(nn.BatchNorm1d(16))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(twin))
    meshc.compile(model, mesh, args=(X,))
    trained((model, twin), 3, eps=1e-3)  # a bias ahead of a norm has no gradient but roundings
    same_parameters(model, twin)
    for name, buffer in twin.named_buffers():
        same(model.get_buffer(name), buffer)
    same(model.eval()(X), twin.eval()(X))


def run(mesh: str, *names: str) -> None:
    run_checks([row.check for row in ROWS], mesh, names)
