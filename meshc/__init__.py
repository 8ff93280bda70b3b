"""meshc compiles an unmodified PyTorch model for a device mesh. See README.md."""

from meshc.api.compile import TrainStep, compile
from meshc.api.first_values import init_weights
from meshc.api.handle import Program
from meshc.api.options import Options
from meshc.api.pretrained import load_pretrained
from meshc.api.rules import register_rule
from meshc.api.verification import verify
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
from meshc.ir.mesh import Mesh
from meshc.package import __version__
from meshc.plan.plan import Plan

__all__ = [
    "ArtifactError",
    "CaptureError",
    "CompileError",
    "DeadlockError",
    "FileError",
    "InputError",
    "MeshcError",
    "Mesh",
    "Options",
    "PeerError",
    "Plan",
    "PlanError",
    "Program",
    "ScheduleError",
    "StateError",
    "TrainStep",
    "VerifyError",
    "__version__",
    "compile",
    "init_weights",
    "load_pretrained",
    "register_rule",
    "verify",
]
