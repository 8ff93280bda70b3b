"""meshc compiles an unmodified PyTorch model for a device mesh. See README.md."""

from meshc.api import Program, TrainStep, compile
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
from meshc.mesh import Mesh
from meshc.options import Options
from meshc.package import __version__
from meshc.plan import Plan
from meshc.verification import verify

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
    "verify",
]
