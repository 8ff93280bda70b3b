"""Table of the private names of torch and transformers that meshc uses.

    from meshc.private import FakeTensorMode        torch._subclasses.fake_tensor.FakeTensorMode, loaded when it is asked for

Nothing else in meshc imports a private module of torch. What is reached by attribute (`torch._C._set_mkldnn_enabled`) stands in the table
too; what is replaced, in `meshc.replacements`. A name that a release has moved raises UnsupportedTorch with the releases that have it;
`tests/test_private.py` looks for every one, and says what moved.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from meshc.errors import CompileError
from meshc.lazy_module import places_of_names

if TYPE_CHECKING:
    import torch._decomp.decompositions as decompositions
    import torch._dynamo.functional_export as functional_export
    import torch._dynamo.graph_region_tracker as graph_region_tracker
    import torch._dynamo.symbolic_convert as symbolic_convert
    import torch._dynamo.trace_rules as trace_rules
    import torch._dynamo.utils as dynamo_utils
    import torch._dynamo.variables as variables
    import torch._dynamo.variables.torch as calls_of_torch
    import torch._functorch.eager_transforms as eager_transforms
    import torch.distributed.tensor._dispatch as dtensor_dispatch
    import torch.distributed.tensor._random as dtensor_random
    import torch.distributed.tensor._redistribute as dtensor_redistribute
    import torch.fx._pytree as trees_of_fx
    import torch.utils._pytree as trees_of_torch
    from torch._decomp import get_decompositions
    from torch._dynamo.functional_export import _dynamo_graph_capture_for_export as graph_capture
    from torch._dynamo.guards import CheckFunctionManager
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.source import AttrSource, LocalSource, UnspecializedNNModuleSource
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting
    from torch._dynamo.variables.builder import VariableBuilder, wrap_fx_proxy
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.higher_order_ops import AutogradFunctionApplyVariable, LocalMapWrappedHigherOrderVariable
    from torch._dynamo.variables.lazy import LazyCache
    from torch._dynamo.variables.misc import LoggingLoggerVariable, StringFormatVariable
    from torch._dynamo.variables.tensor import SymNodeVariable
    from torch._functorch._aot_autograd.descriptors import (
        BackwardTokenAOTInput,
        BackwardTokenAOTOutput,
        BufferAOTInput,
        ForwardTokenAOTInput,
        ForwardTokenAOTOutput,
        GradAOTOutput,
        ParamAOTInput,
        PlainAOTInput,
        PlainAOTOutput,
    )
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as outside_transforms
    from torch._guards import TracingContext, tracing
    from torch._higher_order_ops.effects import with_effects
    from torch._higher_order_ops.flex_attention import math_attention
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
    from torch.fx._lazy_graph_module import _use_lazy_graph_module as lazy_graph_modules
    from torch.nn.modules.adaptive import _ASMoutput as AdaptiveOutput
    from torch.utils._mode_utils import no_dispatch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import TreeSpec

SUPPORTED: Final[Mapping[str, str]] = {"torch": "2.11 to 2.14", "transformers": "5.0 on"}

NAMES: Final = places_of_names(__file__)
"""What other files import from here, and where it is: the imports above, which a type checker alone makes."""

REACHED: Final = (
    "torch:_C._AutoDispatchBelowAutograd", "torch:_C._DisableAutocast", "torch:_C._current_graph_task_id",
    "torch:_C._current_autograd_node", "torch.autograd:_get_sequence_nr",
    "torch:_C._autograd._get_data_attr", "torch:_C.DisableTorchFunction", "torch:_C.DisableTorchFunctionSubclass",
    "torch:_C.DispatchKey", "torch:_C.TensorBase",
    "torch:_C._dispatch_get_registrations_for_dispatch_key", "torch:_C._dispatch_has_kernel_for_dispatch_key",
    "torch:_C._autograd._saved_tensors_hooks_enable", "torch:_C._autograd._saved_tensors_hooks_get_disabled_error_message",
    "torch:_C._exit_dual_level", "torch.autograd.forward_ad:_current_level",
    "torch:_C._functorch.get_dynamic_layer_stack_depth", "torch:_C._functorch.get_unwrapped",
    "torch:_C._functorch.is_functorch_wrapped_tensor", "torch:_C._functorch.pop_dynamic_layer_stack",
    "torch:_C._functorch.peek_interpreter_stack", "torch:_C._get_mkldnn_enabled", "torch:_C._jit_get_all_schemas",
    "torch:_C._set_mkldnn_enabled", "torch:_assert_async", "torch:_foreach_add_", "torch:_foreach_zero_",
    "torch:_fused_adam_", "torch:_fused_adamw_", "torch:_fused_sgd_", "torch:_scaled_grouped_mm", "torch:_scaled_mm",
    "torch.distributed.tensor:DTensor._op_dispatcher._allow_implicit_replication", "torch.distributed.tensor:DTensor._spec",
    "torch.distributed.tensor:DTensor._local_tensor",
    "torch._inductor:compile", "torch.amp.autocast_mode:_enter_autocast", "torch.amp.autocast_mode:_exit_autocast",
    "torch.nn:AdaptiveLogSoftmaxWithLoss._get_full_log_prob",
    "torch.nn.parallel:DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
    "torch._dynamo:config.patch", "torch._dynamo:maybe_mark_dynamic", "torch._dynamo.config:allow_rnn",
    "torch._dynamo.config:skip_guards_on_constant_func_defaults",
    "torch._dynamo.config:_autograd_backward_strict_mode_conditional_banned_ops",
    "torch._dynamo.config:reorderable_logging_functions", "torch._dynamo.config:skip_fwd_side_effects_in_bwd_under_checkpoint",
    "torch._dynamo.symbolic_convert:InstructionTranslatorBase.STORE_ATTR", "torch._dynamo.trace_rules:get_torch_obj_rule_map",
    "torch._dynamo.side_effects:SideEffects._get_modified_vars", "torch._dynamo.utils:proxy_args_kwargs",
    "torch._subclasses.fake_tensor:FakeTensorConverter.add_constant_storage_mapping",
    "torch._subclasses.fake_tensor:SymNumberMemoDescriptor", "torch._dynamo.utils:_compilation_metrics",
    "torch.distributions:Distribution._validate_args", "torch.distributions.kl:_KL_REGISTRY", "torch.fx.graph_module:_loader.eval_cache",
    "torch.nn.attention.flex_attention:BlockMask._flatten", "torch.nn.attention.flex_attention:BlockMask._unflatten",
    "torch.nn.attention.flex_attention:BlockMask._flatten_with_keys",
    "torch.utils._pytree:SUPPORTED_NODES", "torch.utils._pytree:NodeDef", "torch.utils._pytree:SequenceKey",
    "torch.utils._pytree:_deregister_pytree_node", "torch.fx._pytree:SUPPORTED_NODES",
    "torch.fx._pytree:_deregister_pytree_flatten_spec",
)  # fmt: skip
"""What is used where it is, by attribute, and what is looked into."""

OF_TRANSFORMERS: Final = (
    "transformers.utils.output_capturing:_CAN_RECORD_REGISTRY", "transformers.utils.output_capturing:maybe_install_capturing_hooks",
    "transformers.integrations.executorch:register_dynamic_cache_export_support", "transformers.cache_utils:LinearAttentionLayer",
    "transformers.cache_utils:LinearAttentionAndFullAttentionLayer", "transformers.cache_utils:DynamicLayer",
    "transformers.cache_utils:LinearAttentionAndSlidingWindowAttentionLayer", "transformers.cache_utils:DynamicSlidingWindowLayer",
    "transformers.conversion_mapping:get_model_conversion_mapping", "transformers.core_model_loading:dot_natural_key",
    "transformers.core_model_loading:rename_source_key",
)  # fmt: skip
"""What stock models need, and nothing promises."""


class UnsupportedTorch(CompileError):
    """A release of torch, or of transformers, without a name that meshc uses."""


def resolve_name(place: str) -> Any:
    """What a place of the table has, `MODULE` or `MODULE:NAME.NAME`. Raises UnsupportedTorch."""
    module, _, path = place.partition(":")
    package = module.partition(".")[0]
    try:
        value: Any = importlib.import_module(module)
        for name in path.split(".") if path else ():
            value = getattr(value, name)
    except (ImportError, AttributeError) as error:
        version = getattr(sys.modules.get(package), "__version__", "of this environment")
        raise UnsupportedTorch(
            f"{package} {version} has no {place.replace(':', '.')}, which meshc uses: {error}\n"
            f"  what to do: install a release that meshc supports, {package} {SUPPORTED[package]}"
        ) from error
    return value


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"meshc.private has no {name}")
    globals()[name] = value = resolve_name(NAMES[name])
    return value


def text_with_places(frame: Any, text: str, values: Sequence[Any]) -> Any:
    """What Dynamo keeps of `text.format(*values)` where a value is not there yet. From 2.15 on it is told the frame that it is in."""
    create = resolve_name(NAMES["StringFormatVariable"]).create
    told = (frame,) if "tx" in inspect.signature(create).parameters else ()
    return create(*told, text, list(values), {})
