"""Admission checks before tracing: errors for wrapped or compiled models, tensors that are no plain array, inputs that no program takes.

Each table is data: classes by full name (so that nothing is imported to look), what is wrong with them, and what to do instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence

from meshc.errors import CaptureError, InputError, StateError
from meshc.frontend import exported
from meshc.frontend.traced_code import name_of
from meshc.ir import trees

_SPLITS: Final = "{where} is wrapped in torch's {name}, which splits work between devices itself"
_UNWRAP: Final = "give meshc the module inside ({where}.module); the mesh's axes and the plan say who splits what"

MODULES: Final[Mapping[str, tuple[str, str]]] = {
    "torch.nn.parallel.data_parallel.DataParallel": (_SPLITS, _UNWRAP),
    "torch.nn.parallel.distributed.DistributedDataParallel": (_SPLITS, _UNWRAP),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        _SPLITS, 'build the model without the wrapper; plan="fsdp" stores parameters as it does',
    ),
    "torch.distributed.fsdp.FSDPModule": (
        "{where} was given to torch's fully_shard, which splits its parameters itself",
        'build the model without fully_shard; plan="fsdp" stores parameters as it does',
    ),
    "torch._dynamo.eval_frame.OptimizedModule": (
        "{where} is what torch.compile has made of a module, which compiles its calls for one device",
        'give meshc the module inside ({where}._orig_mod); meshc.compile(..., backend="inductor") compiles what each rank runs',
    ),
    "torch.jit._script.ScriptModule": (
        "{where} is a {name} of torch.jit, whose Python is gone: there is nothing left to trace",
        "give meshc the module that torch.jit.script or torch.jit.trace was given",
    ),
    "torch.export._unlift._StatefulGraphModule": (
        "{where} is the module of an ExportedProgram inside another: what calls pass it cannot be compared with what it was exported for",
        "compile it by itself; or put the module that torch.export.export was given in its place",
    ),
    **dict.fromkeys(("torch.ao.nn.quantized.", "torch.ao.nn.intrinsic.quantized.", "torch.ao.nn.sparse.quantized."), (
        "{where} is {name}, a quantized layer of torch.ao: its weights are packed for one device's kernels, which nothing can split",
        "compile the model before it was quantized",
    )),
    **dict.fromkeys(("torch.ao.quantization.fake_quantize.", "torch.ao.quantization.observer."), (
        "{where} is {name} of torch.ao, which nothing can trace: it branches on flags in its buffers, and gives them new shapes",
        "leave prepare_qat out, and call torch.fake_quantize_per_tensor_affine or torch.fake_quantize_per_channel_affine in forward, with "
        "a scale and a zero point in buffers, as observed before on one device",
    )),
}  # fmt: skip
"""Classes of modules that are refused, by full name or by package (with a dot at its end): (what is wrong, what to do)."""

MODELS: Final[Mapping[str, str]] = {
    "torch.export.exported_program.ExportedProgram": "give it the module of the ExportedProgram: TrainStep(exported.module(), ...)",
    "torch.jit.torch.jit.ScriptFunction": "give meshc the Python function that torch.jit.script was given",
}

INPUTS: Final[tuple[tuple[Callable[[Any], bool], str], ...]] = (
    (lambda value: isinstance(value, numpy.ndarray | numpy.generic), "pass a tensor: torch.from_numpy(x), or torch.as_tensor(x)"),
    (lambda value: isinstance(value, PackedSequence), "pass the padded tensor and, where the model needs them, a mask of the same shape"),
    (inspect.isgenerator, "pass a list or a tuple: list(x)"),
    (lambda value: isinstance(value, set | frozenset), "pass a list or a tuple, whose order is fixed: sorted(x)"),
    (
        lambda value: hasattr(value, "__dataclass_fields__") and not isinstance(value, type),
        "register the class once, torch.utils._pytree.register_dataclass({name}), or pass its tensors as arguments",
    ),
)
"""Python inputs that are refused: (predicate, what to do)."""


def refuse_kind(what: Any) -> None:
    """Refuses what is no module, TrainStep or function. Raises CaptureError."""
    model = getattr(what, "model", what) if type(what).__name__ == "TrainStep" else what
    advice = MODELS.get(name_of(type(model)))
    if advice is not None:
        raise CaptureError(f"meshc traces Python, and this is {_a(model)}: its Python is gone\n  what to do: {advice}")
    if isinstance(model, type):
        raise CaptureError(f"{model.__name__} is a class\n  what to do: give meshc an instance: {model.__name__}(...)")
    if model is not what and not isinstance(model, nn.Module):
        raise CaptureError(
            f"a TrainStep trains a module, and its model is {_a(model)}\n"
            "  what to do: TrainStep(model, ...) with an nn.Module that holds the parameters"
        )
    if model is not what and what.loss is not None and not callable(what.loss):
        raise CaptureError(
            f"the loss of a TrainStep is a function of the model's output, not {_a(what.loss)}\n"
            "  what to do: TrainStep(..., loss=torch.nn.functional.cross_entropy), or a function of your own"
        )
    if not callable(model):
        raise CaptureError(
            f"meshc compiles a module, a TrainStep or a function, not {_a(model)}\n"
            "  what to do: meshc.compile(model, mesh, ...)"
        )


def refuse_examples(args: object, kwargs: object) -> None:
    """Refuses `args` that are no sequence, such as a bare tensor, and `kwargs` that are no mapping. Raises InputError."""
    if isinstance(args, Tensor) or not isinstance(args, Sequence):
        raise InputError(f"args is a sequence of positional arguments, not {_a(args)}\n  what to do: args=(x,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InputError(f'kwargs has arguments by name; it is {_a(kwargs)}\n  what to do: kwargs={{"x": x}}')


def refuse_empty(inputs: Iterable[tuple[str, Tensor]]) -> None:
    """Refuses a training step over an empty batch, whose mean loss is NaN and would make every weight NaN. Raises InputError."""
    rows = [(name, tensor) for name, tensor in inputs if tensor.dim()]
    empty = [f"{name} {list(tensor.shape)}" for name, tensor in rows if tensor.shape[0] == 0]
    if empty and rows[0][1].shape[0] == 0:  # the first has the batch; another may be empty for reasons of its own
        raise InputError(
            f"a training step over an empty batch: {', '.join(empty)}\n  why: the mean of no rows is NaN, and so would every weight be\n"
            "  what to do: skip the step where the batch is empty, on all ranks"
        )


def refuse_module(module: nn.Module, adopted: bool) -> None:
    """Refuses a model with modules or tensors that meshc cannot compile. `adopted`: its parameters are meshc's already. Raises CaptureError
    with every fault found, or StateError for a lazy parameter."""
    faults = [*_refused_modules(module)]
    if not faults and not adopted:
        faults = [*_foreign_tensors(module)] or [*_overlapping(module)]
    if faults:
        raise CaptureError("the model cannot be compiled as it is:\n  " + "\n  ".join(dict.fromkeys(faults)))


def refuse_inputs(names: Sequence[str], args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Refuses inputs that no program takes, whatever its examples were. Raises InputError. `names`: paths of the leaves."""
    leaves = trees.leaves((tuple(args), dict(kwargs)))
    faults = [foreign_tensor(f"input {name}", leaf) for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, Tensor)]
    packed = [value for value in (*args, *kwargs.values()) if isinstance(value, PackedSequence)]
    for name, leaf in [*zip(names, leaves, strict=True), *[("of the model", value) for value in packed]]:
        for which, advice in INPUTS:
            if which(leaf):
                faults.append(f"input {name} is {_a(leaf)}; what to do: {advice.format(name=type(leaf).__name__)}")
    found = [fault for fault in faults if fault]
    if found:
        raise InputError("inputs that no program takes:\n  " + "\n  ".join(found))


def does_not_bind(signature: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """Why a call does not fit the model's forward, with its signature; "" if the call fits or the signature is unknown."""
    try:
        takes = inspect.signature(signature)
    except (TypeError, ValueError):
        return ""
    try:
        takes.bind(*args, **kwargs)
    except TypeError as error:
        return f"the call does not fit {getattr(signature, '__name__', 'the model')}{takes}: {error}"
    return ""


def _refused_modules(module: nn.Module) -> Iterator[str]:
    """A line for each refused class, with the first of its modules and the number of others."""
    refused: list[str] = []
    faults: dict[tuple[str, str, str], list[str]] = {}
    for path, child in module.named_modules():
        if any(path.startswith(f"{one}.") or not one for one in refused):
            continue  # inside what is refused already
        for base in type(child).__mro__:
            full = name_of(base)
            found = MODULES.get(full) or next((row for key, row in MODULES.items() if key[-1] == "." and full.startswith(key)), None)
            if found is not None and (path or full != exported.MODULE):
                refused.append(path)
                faults.setdefault((type(child).__name__, *found), []).append(path)
                break
    for (name, text, advice), paths in faults.items():
        where = f"model.{paths[0]}" if paths[0] else "the model"
        more = f" (so {'is' if len(paths) == 2 else 'are'} {len(paths) - 1} more)" if len(paths) > 1 else ""
        yield f"{text.format(where=where, name=name)}{more}; what to do: {advice.format(where=where if paths[0] else 'model')}"


def _foreign_tensors(module: nn.Module) -> Iterator[str]:
    copies = _copies(module)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise StateError(
                f"{name} has no shape yet: a lazy module makes its parameters at its first call\n"
                "  what to do: call the model once on an example before meshc.compile"
            )
        if isinstance(tensor, DTensor):
            if name.startswith(copies):
                continue
            yield (
                f"{name} is a DTensor that meshc did not make (parallelize_module, distribute_tensor); what to do: build the model plain, "
                "and say in the plan what splits it"
            )
        elif fault := foreign_tensor(name, tensor):
            yield fault
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if isinstance(value, Tensor) and value.layout is not torch.strided:
                yield foreign_tensor(f"{path}.{name}" if path else name, value)


def _copies(module: nn.Module) -> tuple[str, ...]:
    """Path prefixes of copies of compiled models, whose DTensors are meshc's; a copy is known by its pre-hook."""
    return tuple(
        f"{path}." if path else ""
        for path, child in module.named_modules()
        if any(getattr(hook, "is_copy", False) for hook in child._forward_pre_hooks.values())
    )


def foreign_tensor(name: str, tensor: Tensor) -> str:
    """What is wrong with a tensor that is no plain array, and what to do; "" for a plain array."""
    if tensor.is_nested:
        return f"{name} is a nested tensor, whose rows have sizes of their own; what to do: pad it (to_padded_tensor) and mask the rest"
    if tensor.is_quantized:
        return f"{name} is quantized ({tensor.dtype}); what to do: dequantize() it before"
    if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point:
        return f"{name} is {tensor.dtype}, in which nothing is computed; what to do: hold it in bfloat16, or cast inside the model only"
    if tensor.layout is not torch.strided:
        return f"{name} is sparse ({tensor.layout}), and programs compute with dense tensors; what to do: to_dense() it before"
    return ""


def _overlapping(module: nn.Module) -> Iterator[str]:
    """Trained parameters that share memory with another tensor of the model: on one device alone, an update of one changes the other."""
    tensors: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not isinstance(tensor, DTensor) and not tensor.is_meta and tensor.numel():
            tensors.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for rows in tensors.values():
        trained = [row for row in rows if row[1].requires_grad]
        for name, one in trained:
            if any(stride == 0 and size > 1 for stride, size in zip(one.stride(), one.shape, strict=True)):
                yield f"{name} is an expanded view: several of its elements are one place in memory; what to do: make it contiguous()"
            for other_name, other in rows:
                if other is not one and (other_name > name or not other.requires_grad) and _share_bytes(one, other):
                    yield (
                        f"{name} and {other_name} are two tensors in one memory, so that training one changes the other; what to do: use "
                        "one nn.Parameter for both (that is a tied weight, and works), or clone() one"
                    )


def _share_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two strided tensors of one storage have a byte in common."""
    (a, b), (c, d) = _span(one), _span(other)
    if b <= c or d <= a:
        return False
    start = min(a, c)
    marks = torch.zeros(max(b, d) - start, dtype=torch.bool)
    size = one.element_size()
    if size != other.element_size():
        return True
    mine, theirs = (
        marks.as_strided(tensor.shape, [stride * size for stride in tensor.stride()], tensor.storage_offset() * size - start)
        for tensor in (one, other)
    )
    mine.fill_(True)
    return bool(theirs.any())


def _span(tensor: Tensor) -> tuple[int, int]:
    last = sum((int(size) - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + (last + 1) * tensor.element_size()


def _a(value: object) -> str:
    """The name of a value's class, with its article."""
    name = type(value).__name__
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}"
