"""Registry of what meshc replaces of other libraries: each target with its form, since which release, for how long, and why.

    with replace_targets(lstm_layer=layer):              torch's function is `layer` inside, and afterwards its own again
    with replace_in("rope", [(owner, "forward", f)]):    of targets with a `*` the owners are given
    replace_for_good("random_tracker", draws)            for the rest of the process

No other file puts something of meshc's in the place of a library's. A target without its form raises UnsupportedTorch; what a process has
not imported of a library other than torch is left alone. Hooks and settings that a library offers (forward hooks, `config.patch`, signal
handlers) replace nothing; neither do attributes of a user's own modules. `tests/test_replacements.py` is the canary of each entry.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from meshc.private import SUPPORTED, UnsupportedTorch

_ABSENT: Final = object()
_ORIGINS: Final = ("torch", "builtins", "collections")
"""Packages, beside a library's own, of the values that it has."""


@dataclass(frozen=True)
class Replacement:
    """One target.

    target    `MODULE:NAME.NAME`, with `[]` where entries of a table are replaced; `*` stands for any text
    form      the first parameters of a function, `(self, tx)`; of other values the class; "": any, or that it need not be there
    why       what torch, or another library, does otherwise
    since     the first release of the library in which it was seen in this form; default: the first of torch that is supported
    during    a trace (or the reference run that a program is compared with), a call, the process, or as long as an object of the library's
    optional  releases without it need no replacement
    """

    target: str
    form: str
    why: str
    since: str = "2.11"
    during: Literal["trace", "call", "process", "object"] = "trace"
    optional: bool = False

    @property
    def library(self) -> str:
        package = self.target.partition(":")[0].partition(".")[0]
        return "Python" if package in sys.stdlib_module_names else package.replace("*", "any")

    @property
    def is_table(self) -> bool:
        return self.target.endswith("[]")

    def split(self) -> tuple[str, list[str], str]:
        """The module, the names between it and the attribute, and the attribute."""
        module, _, path = self.target.removesuffix("[]").partition(":")
        *owners, attribute = path.split(".")
        return module, owners, attribute


REPLACEMENTS: Final[Mapping[str, Replacement]] = {
    "export_guards": Replacement(
        "torch._dynamo.functional_export:_suggest_or_raise_constraint_violation", "(module_to_trace, orig_callable)",
        "export builds guards for limits of sizes, of which there are none, and discards them"),
    "function_names": Replacement(
        "torch._dynamo.symbolic_convert:get_funcname", "(filename, lineno)", "parses whole files for the function of each line, for logs"),
    "backend_lookup": Replacement(
        "torch._dynamo:lookup_backend", "(compiler_fn)", "imports all backends, and none is used"),
    "input_pickler": Replacement(
        "torch._dynamo.graph_region_tracker:InputPickler", "type", "imports Inductor when it is created, and is not used"),
    "local_map_check": Replacement(
        "torch._dynamo.variables.higher_order_ops:LocalMapWrappedHigherOrderVariable.should_wrap_in_hop", "(value)",
        "imports DTensor's experiments to compare with"),
    "dynamo_reset": Replacement(
        "torch._dynamo:reset", "()", "export drops what the user has compiled in this process"),
    "size_profile": Replacement(
        "torch._dynamo.pgo:_CODE_STATE", "NoneType | defaultdict", "sizes of earlier calls would open those of a trace"),
    "initial_size_profile": Replacement(
        "torch._dynamo.pgo:_INIT_CODE_STATE", "NoneType | defaultdict", "likewise, of earlier processes"),
    "mutation_code": Replacement(
        "torch._dynamo.side_effects:SideEffects.codegen_update_mutated", "(self, cg)",
        "where Dynamo has its account of changed Python state, of read values and of traced code complete"),
    "print_call": Replacement(
        "torch._dynamo.variables.misc:DebuggingVariable.call_function", "(self, tx, args, kwargs)",
        "prints and warnings are skipped; they are carried out once"),
    "log_call": Replacement(
        "torch._dynamo.variables.misc:LoggingLoggerVariable.call_method", "(self, tx, name, args, kwargs)", "likewise logging"),
    "builtin_call": Replacement(
        "torch._dynamo.variables.builtin:BuiltinVariable.call_function", "(self, tx, args, kwargs)", "fails at texts with tensors in them"),
    "main_instructions": Replacement(
        "torch._dynamo.symbolic_convert:InstructionTranslator.dispatch_table", "list",
        "fails at branches that only raise, or that no draw decides, and at `x.requires_grad = True`"),
    "inlined_instructions": Replacement(
        "torch._dynamo.symbolic_convert:InliningInstructionTranslator.dispatch_table", "list", "likewise"),
    "generator_instructions": Replacement(
        "torch._dynamo.symbolic_convert:InliningGeneratorInstructionTranslator.dispatch_table", "list", "likewise"),
    "torch_refusals": Replacement(
        "torch._dynamo.variables.torch:unimplemented", "(gb_type)", "refuses `out=` into a view for its strides"),
    "torch_call": Replacement(
        "torch._dynamo.variables.torch:TorchInGraphFunctionVariable.call_function", "(self, tx, args, kwargs)",
        "refuses `torch.autograd.grad` beside leaves that a function returns"),
    "leaf_mark": Replacement(
        "torch._dynamo.variables.tensor:TensorVariable.method_requires_grad_", "(self, tx, requires_grad)",
        "likewise; leaves are nodes of the graph"),
    "tensor_list": Replacement(
        "torch._dynamo.variables:TensorVariable.method_tolist", "(self, tx)", "takes known values for unknown"),
    "wrapped_number": Replacement(
        "torch._dynamo.variables.builder:VariableBuilder._wrap", "(self, value)", "Python numbers that are inputs would be constants"),
    "lazy_number": Replacement(
        "torch._dynamo.variables.lazy:LazyConstantVariable.create", "(value, source)", "likewise"),
    "number_guard": Replacement(
        "torch._dynamo.variables.tensor:SymNodeVariable.evaluate_expr", "(self, output_graph)",
        "a branch on such a number has its present outcome, which is part of a call's key"),
    "cloned_input": Replacement(
        "torch._dynamo.variables.builder:_clone_input", "(value, fake_mode)",
        "copies a tensor that a transform of `torch.func` reads first as one of the transform's"),
    "autograd_function_call": Replacement(
        "torch._dynamo.variables.higher_order_ops:AutogradFunctionApplyVariable.call_function", "(self, tx, args, kwargs)",
        "2.11 traces the gradient of a tensor that is given twice once; later releases refuse it"),
    "forward_jacobian": Replacement(
        "torch._functorch.eager_transforms:jacfwd", "(func, argnums, has_aux)",
        "`hessian` by jacfwd needs tangents that fake tensors do not have"),
    "fake_dispatch": Replacement(
        "torch._subclasses.fake_tensor:FakeTensorMode.dispatch", "(self, func, types, args, kwargs)",
        "values that no input decides are known; in a copy in double precision norms of float32 are double"),
    "known_elements": Replacement(
        "torch._subclasses.fake_tensor:CONSTANT_NUMEL_LIMIT", "int", "known values have one element at most"),
    "lstm_layer": Replacement(
        "torch._decomp.decompositions:one_layer_lstm", "(inp, hidden, params, has_biases, reverse)",
        "2.11 gives last states of several sequences one dim of length 1 too many"),
    "jit_isinstance": Replacement(
        "torch.jit:isinstance", "(obj, target_type)", "cannot be traced"),
    "batch_norm": Replacement(
        "torch.nn.modules.batchnorm:_BatchNorm.forward", "(self, input)", "with momentum=None takes a Python number from a tensor"),
    "synced_batch_norm": Replacement(
        "torch.nn:SyncBatchNorm.forward", "(self, input)", "sends statistics between ranks, on CUDA alone"),
    "causal_hint": Replacement(
        "torch.nn.modules.transformer:_detect_is_causal_mask", "(mask, is_causal, size)", "compares a mask's values with a causal one's"),
    "adaptive_loss": Replacement(
        "torch.nn:AdaptiveLogSoftmaxWithLoss.forward", "(self, input_, target_)",
        "gives each cluster its rows, whose number targets decide"),
    "adaptive_prediction": Replacement(
        "torch.nn:AdaptiveLogSoftmaxWithLoss.predict", "(self, input)", "likewise"),
    "ctc_loss": Replacement(
        "torch.nn.functional:ctc_loss", "(log_probs, targets, input_lengths, target_lengths, blank, reduction)",
        "has no form that splits by rows"),
    "cudnn_flags": Replacement(
        "torch.backends.cudnn:flags", "(enabled)", "stock models choose kernels for that loss by it, which is not traced"),
    "grouped_product": Replacement(
        "torch:_grouped_mm", "builtin_function_or_method",
        "takes bfloat16 alone on fake tensors, and has no float64 version, in which programs are verified"),
    "functional_grouped_product": Replacement(
        "torch.nn.functional:grouped_mm", "(mat_a, mat_b, offs, bias, out_dtype)", "likewise"),
    "divergences": Replacement(
        "torch.distributions.kl:_KL_MEMOIZE[]", "dict", "searches for the function of two classes, which is not traced"),
    "flex_device_check": Replacement(
        "torch.nn.attention.flex_attention:_validate_device", "(query, key, value)", "refuses gradients on a CPU"),
    "flex_kernel_options": Replacement(
        "torch.nn.attention.flex_attention:_apply_kernel_options", "(query, key, value, return_lse, kernel_options)",
        "refuses the greatest scores on a CPU"),
    "flex_compilation": Replacement(
        "torch.nn.attention.flex_attention:_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", "bool",
        "compiles the call, which does not work under dispatch modes: in a reference"),
    "flex_operator": Replacement(
        "torch.nn.attention.flex_attention:flex_attention_hop", "(query, key, value, score_mod, block_mask)",
        "likewise; as plain operators"),
    "compiling_flag": Replacement(
        "torch.compiler:_is_compiling_flag", "bool", "layers are compared on the branches that a trace takes"),
    "dynamo_compiling": Replacement(
        "torch.compiler:is_dynamo_compiling", "()", "likewise"),
    "autograd_function": Replacement(
        "torch.autograd:Function.apply", "method | builtin_function_or_method",
        "where layers are compared: their calls are recorded with arguments, since their backward is not run"),
    "layer_call": Replacement(
        "torch.nn:Module._call_impl", "(self, args, kwargs)",
        "in the layers that are compared: what they call is recorded, hooks included"),
    "drawn_tokens": Replacement(
        "torch:multinomial", "builtin_function_or_method",
        "in `generate` of several ranks' rows: each rank's rows are drawn by its own generator", during="call"),
    "random_tracker": Replacement(
        "torch.distributed.tensor._random:_rng_tracker", "NoneType",
        "has nobody who places random draws of DTensors on CPU meshes: those of one device", during="process"),
    "operand_exchange": Replacement(
        "torch.distributed.tensor._dispatch:redistribute_local_tensor", "(local_tensor, current_spec, target_spec)",
        "a rank that exchanges alone would wait for ever: exchanges are noted", during="process"),
    "asked_exchange": Replacement(
        "torch.distributed.tensor._redistribute:redistribute_local_tensor", "(local_tensor, current_spec, target_spec)", "likewise",
        during="process"),
    "dtensor_operators": Replacement(
        "torch.distributed.tensor:DTensor._op_dispatcher._custom_op_handlers[]", "dict",
        "views, edits and numbers of a compiled model's tensors that torch refuses, or takes of a part", during="process"),
    "dtensor_numpy": Replacement(
        "torch.distributed.tensor:DTensor.numpy", "method_descriptor", "refuses tensors that are whole on each rank", during="process"),
    "dtensor_list": Replacement(
        "torch.distributed.tensor:DTensor.tolist", "method_descriptor", "likewise", during="process"),
    "dtensor_text": Replacement(
        "torch.distributed.tensor:DTensor.__format__", "(self, format_spec)", "likewise", during="process"),
    "experts": Replacement(
        "transformers.integrations.moe:ALL_EXPERTS_FUNCTIONS[]", "ExpertsInterface", "sorts rows by expert; without sorting they are split",
        since="5.0"),
    "block_mask": Replacement(
        "transformers.masking_utils:create_block_mask", "(mask_mod, B, H, Q_LEN, KV_LEN)",
        "compiles the mask's function, which a trace does not enter", since="5.0"),
    "mask_test": Replacement(
        "transformers.masking_utils:fast_all", "(tensor)", "drops a padding mask that is all true: a trace serves all masks", since="5.15"),
    "mask_padding": Replacement(
        "transformers.masking_utils:prepare_padding_mask", "(attention_mask, kv_length, kv_offset)",
        "pads by the number of the first token, which is a tensor", since="5.0", optional=True),
    "block_padding": Replacement(
        "transformers.masking_utils:maybe_pad_block_sequence_ids", "(block_sequence_ids, attention_mask, kv_length, kv_offset)", "likewise",
        since="5.10", optional=True),
    "cache_kinds": Replacement(
        "transformers.cache_utils:get_layer_types_and_kwargs", "(config)",
        "copies the configuration for each layer, which Dynamo would follow line by line", since="5.15", optional=True),
    "model_hooks": Replacement(
        "transformers.utils.output_capturing:install_all_output_capturing_hooks", "(model, prefix)",
        "gives a model with hooks those of the model around it too, and collects each value twice", since="5.2"),
    "collector": Replacement(
        "transformers.utils.output_capturing:_active_collector", "CompileableContextVar",
        "compiled, it loses the outer call's collection when an inner call ends", since="5.2"),
    "own_masks": Replacement(
        "transformers.models.*:is_torchdynamo_compiling", "()",
        "of Switch Transformers and LongT5: they build the mask that they need unless they are compiled", since="5.0"),
    "selective_scan": Replacement(
        "transformers.models.*:mamba_selective_scan", "", "a loop over positions; as one recurrence", since="5.15"),
    "short_convolution": Replacement(
        "transformers.models.*:causal_conv1d_fn", "", "pads on both sides and cuts, which splits no sequence", since="5.0"),
    "delta_rule": Replacement(
        "transformers.models.*:torch_chunk_gated_delta_rule", "", "a loop over chunks", since="5.0"),
    "decaying_average": Replacement(
        "transformers.models.*:rwkv_linear_attention", "", "a loop over positions", since="5.0"),
    "rope": Replacement(
        "transformers.models.*:*.forward", "(self, x, position_ids)",
        "of embeddings that follow the length: compares it, a tensor, in Python", since="5.0"),
    "trainer_saving": Replacement(
        "transformers:Trainer._save_optimizer_and_scheduler", "(self, output_dir)",
        "in a Trainer of a compiled model: would save a part of the optimizer's state", since="5.0", during="object"),
    "trainer_mark": Replacement(
        "transformers:PreTrainedModel._is_distributed_loading_by_transformers", "bool",
        "in a compiled model: the Trainer would wrap it in DDP, and move it", since="5.19", during="object"),
    "image_encoding": Replacement(
        "transformers:GenerationMixin._supports_mm_encoder_outputs", "(self)",
        "in a compiled model: `generate` would call its encoder, which is no program", since="5.19", during="object"),
    "generation": Replacement(
        "transformers:GenerationMixin.generate", "", "in a compiled model: prompts are of one rank or of all", since="5.0",
        during="object"),
    "adapted_parameters": Replacement(
        "peft.tuners.lora.layer:ParamWrapper.forward", "(self, x)",
        "registers a parametrization in every call; parameter + delta as a value", since="0.21"),
    "accelerate_mark": Replacement(
        "accelerate.accelerator:*._is_accelerate_prepared", "", "in a compiled model: Accelerate would wrap it in DDP", since="1.15",
        during="object"),
    "gathering": Replacement(
        "accelerate:Accelerator.gather", "(self)", "in an Accelerator: would count parts of a batch that ranks share several times",
        since="1.15", during="object"),
    "dealing_mesh": Replacement(
        "accelerate.state:AcceleratorState.device_mesh", "", "in Accelerate's state: loaders would deal a part of its own to each process",
        since="1.15", during="object"),
    "log": Replacement(
        "logging:Logger._log", "(self, level, msg, args)", "where layers are compared: model code that runs says nothing", since="3.10"),
    "warning_once": Replacement(
        "logging:Logger.warning_once", "(self, args, kwargs)", "likewise, and can say it later (transformers')", since="3.10",
        optional=True),
    "info_once": Replacement(
        "logging:Logger.info_once", "(self, args, kwargs)", "likewise", since="3.10", optional=True),
    "optimizer_math": Replacement(
        "*:*", "", "`math`, and functions of it, in modules of optimizers' classes: they take no tensors", since="3.10"),
}  # fmt: skip
"""By name; names are in the calls that replace."""


@contextmanager
def replace_targets(**values: object) -> Iterator[None]:
    """A context in which targets, by their names in the table, have these values; of a table, a mapping of entries.

    Contexts nest, and restore what was there before, after an exception too. Raises UnsupportedTorch for a target that is not there, or is
    of another form; one of a library that the process has not imported is left alone.
    """
    with ExitStack() as stack:
        for name, value in values.items():
            owner = owner_of(REPLACEMENTS[name])
            if owner is not None:
                stack.callback(_set(REPLACEMENTS[name], owner, REPLACEMENTS[name].split()[2], value))
        yield


@contextmanager
def replace_in(name: str, rows: Iterable[tuple[object, str, object]]) -> Iterator[None]:
    """A context in which (owner, attribute, value) hold of a target with many owners."""
    with ExitStack() as stack:
        for owner, attribute, value in rows:
            stack.callback(_set(REPLACEMENTS[name], owner, attribute, value))
        yield


def replace_for_good(name: str, value: object, owner: object = None) -> None:
    """Replace a target for the rest of the process, or of `owner`, an object of the library's."""
    entry = REPLACEMENTS[name]
    _set(entry, owner_of(entry) if owner is None else owner, entry.split()[2], value)


def places_of(library: str) -> tuple[str, ...]:
    """The places of a library that its supported releases have to have, as in `meshc.private`."""
    needed = [entry for entry in REPLACEMENTS.values() if entry.library == library and not entry.optional and entry.during != "object"]
    return tuple(entry.target.removesuffix("[]") for entry in needed if "*" not in entry.target)


def owner_of(entry: Replacement) -> Any | None:
    """The module, class or object with the target's attribute; None if there is nothing to replace. Raises UnsupportedTorch."""
    module, owners, attribute = entry.split()
    if entry.library not in ("torch", "Python") and module not in sys.modules:
        return None
    try:
        owner: Any = importlib.import_module(module)
        for name in owners:
            owner = getattr(owner, name)
        getattr(owner, attribute)
    except (ImportError, AttributeError) as error:
        if entry.optional:
            return None
        raise _unsupported(entry, f"has none: {error}") from error
    return owner


def check_form(entry: Replacement, own: object) -> None:
    """Raises UnsupportedTorch for a value of the library's that is of another form than the table says. What meshc or a user has put there
    has any form."""
    made_by = own.func if isinstance(own, partial) else own
    origin = (getattr(made_by, "__module__", None) or type(made_by).__module__).partition(".")[0]
    if not entry.form or origin not in (*_ORIGINS, entry.split()[0].partition(".")[0]):
        return
    if not entry.form.startswith("("):
        if type(own).__name__ not in entry.form.split(" | "):
            raise _unsupported(entry, f"is of the class {type(own).__name__}")
        return
    wanted = [name for name in entry.form.strip("()").split(", ") if name not in ("", "self")]
    try:
        found = [name for name in inspect.signature(own).parameters if name != "self"] if callable(own) else None
    except ValueError:
        found = None
    if found is None or found[: len(wanted)] != wanted:
        raise _unsupported(entry, f"is {type(own).__name__}" + (f"({', '.join(found)})" if found is not None else ""))


def _unsupported(entry: Replacement, what: str) -> UnsupportedTorch:
    version = getattr(sys.modules.get(entry.library), "__version__", "of this environment")
    return UnsupportedTorch(
        f"{entry.library} {version}: {entry.target.replace(':', '.')}, which meshc replaces, is to be {entry.form or 'there'}, and {what}\n"
        f"  what to do: install a release that meshc supports, {entry.library} {SUPPORTED.get(entry.library, f'{entry.since} on')}"
    )


def _set(entry: Replacement, owner: Any, attribute: str, value: Any) -> Callable[[], object]:
    """Replaces an attribute, or entries of the table that it is; returns what restores it."""
    check_form(entry, getattr(owner, attribute, None))
    if entry.is_table:
        return _set_entries(getattr(owner, attribute), value)
    before = vars(owner).get(attribute, _ABSENT)
    stack = ExitStack()
    stack.callback(partial(delattr, owner, attribute) if before is _ABSENT else partial(setattr, owner, attribute, before))
    setattr(owner, attribute, value)
    table = vars(owner).get("tp_methods", {})  # from torch 2.14 on Dynamo's variables look their methods up in it
    for name in [name for name, method in table.items() if method.handler is before]:
        stack.callback(_set_entries(table, {name: type(table[name])(value)}))
    return stack.close


def _set_entries(table: Any, values: Mapping[Any, object]) -> Callable[[], None]:
    before = {key: table.get(key) for key in values}
    for key, value in values.items():
        table[key] = value

    def restore() -> None:
        for key, own in before.items():
            del table[key]
            if own is not None and table.get(key) is not own:  # of a table of transformers' its own entry is there again
                table[key] = own

    return restore
