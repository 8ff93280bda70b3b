"""meshc compiles an unmodified PyTorch model for a device mesh. See README.md.

What users call is imported when it is first asked for: `import meshc` takes no longer than its errors do.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from meshc.errors import (
    ArtifactError,
    CaptureError,
    CompileError,
    DeadlockError,
    FileError,
    InputError,
    MeshcError,
    PeerError,
    PlanError,
    ScheduleError,
    StateError,
    VerifyError,
)
from meshc.lazy_module import places_of_names
from meshc.package import __version__

if TYPE_CHECKING:
    from meshc.api.compile import TrainStep, compile
    from meshc.api.first_values import init_weights
    from meshc.api.handle import Program
    from meshc.api.prefetching import prefetch
    from meshc.api.pretrained import load_pretrained
    from meshc.api.rule_registration import register_rule
    from meshc.api.trainer import trainer_checkpoints
    from meshc.api.verification import verify
    from meshc.ir.mesh import Mesh
    from meshc.optimizer.registered_updates import register_update
    from meshc.options import Debugging, Experts, LocalInputs, Options, Pipelining, SplitSequence, Training
    from meshc.plan.plan import Plan

__all__ = [
    "ArtifactError",
    "CaptureError",
    "CompileError",
    "DeadlockError",
    "Debugging",
    "Experts",
    "FileError",
    "InputError",
    "LocalInputs",
    "MeshcError",
    "Mesh",
    "Options",
    "PeerError",
    "Pipelining",
    "Plan",
    "PlanError",
    "Program",
    "ScheduleError",
    "SplitSequence",
    "StateError",
    "TrainStep",
    "Training",
    "VerifyError",
    "__version__",
    "compile",
    "init_weights",
    "load_pretrained",
    "prefetch",
    "register_rule",
    "register_update",
    "trainer_checkpoints",
    "verify",
]

if not TYPE_CHECKING:  # a type checker knows what there is, and refuses the rest

    def __getattr__(name: str) -> Any:
        if name in places_of_names(__file__):
            value = getattr(importlib.import_module(places_of_names(__file__)[name].partition(":")[0]), name)
        elif not name.startswith("_") and importlib.util.find_spec(f"meshc.{name}") is not None:
            value = importlib.import_module(f"meshc.{name}")
        else:
            raise AttributeError(f"module 'meshc' has no attribute {name!r}")
        globals()[name] = value
        return value
