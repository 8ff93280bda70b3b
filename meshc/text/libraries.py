"""Allow-list of the operator libraries that a text may name besides torch and meshc: those the caller trusts, none by default.

Kernels and fakes trust their arguments; for those of torch and meshc, `operators.txt` and `meshc/check` ensure that this is safe. For
another library only its author can, so the reader of a program has to allow the library by name. The name never comes from the program.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch.fx import Graph

from meshc.errors import ArtifactError
from meshc.private import OpOverload

OWN: Final = ("aten", "meshc")
"""Libraries whose operators are listed one by one."""
TORCHS: Final = frozenset(
    "torch prim prims c10d _c10d_functional _c10d_functional_autograd _dtensor debugprims rngprims inductor onednn mkldnn "
    "mkldnn_prepacked mkl quantized quantized_decomposed higher_order profiler symm_mem streams xnnpack metal vulkan "
    "prepacked static_runtime cuda bundled _quantized _caffe2 _test aten_backup fsdp sparse export dist _inductor_test".split()
)
"""Libraries of torch whose operators no program needs, and which access processes, groups or memory."""

_allowed: Final[set[str]] = set()
_ANY: Final = "any library"
"""Stands for all libraries; no library has this name."""


def allow(words: str) -> None:
    """Let programs that this process reads name the operators of a library: `mylib`, whose module is imported, or `mylib=package.module`.

    Raises ArtifactError for one of torch's or meshc's own, or if its module cannot be imported or defines no operator.
    """
    library, _, module = words.partition("=")
    named = library if "=" not in words else module
    if not library.isidentifier() or not all(part.isidentifier() for part in named.split(".")):
        raise ArtifactError(f"--allow {words}: give the name of a library of operators, mylib, or LIBRARY=MODULE, mylib=my_package.ops")
    if library in OWN or library in TORCHS:
        raise ArtifactError(f"--allow {words}: of torch's and meshc's own operators those that programs need are listed, and no others")
    try:
        importlib.import_module(module or library)
    except ImportError as error:
        raise ArtifactError(
            f"--allow {words}: the module {module or library} cannot be imported: {error}\n"
            f"  what to do: put its folder on PYTHONPATH, or name the module that defines the operators: --allow {library}=MODULE"
        ) from error
    if not any(schema.name.startswith(f"{library}::") for schema in torch._C._jit_get_all_schemas()):
        raise ArtifactError(f"--allow {words}: the module {module or library} defines no operators of {library}")
    _allowed.add(library)


@contextmanager
def trust_libraries() -> Iterator[None]:
    """Context in which texts may name operators of any library of this process: for texts from another rank of the same run."""
    _allowed.add(_ANY)
    try:
        yield
    finally:
        _allowed.discard(_ANY)


def is_allowed(library: str) -> bool:
    return library in OWN or library in _allowed or (_ANY in _allowed and library not in TORCHS)


def forbidden(name: str) -> str:
    """Error text for an operator of a library that is not allowed, with what to do."""
    library = name.partition(".")[0]
    return (
        f"the operator {name} is not on the allow-list: the library {library} is neither torch's nor meshc's, and nobody has allowed it\n"
        f"  what to do: if you trust its operators with whatever this program gives them, --allow {library}, which imports the module "
        f"{library} (--allow {library}=MODULE another)"
    )


def libraries_of(graph: Graph) -> set[str]:
    """The libraries that the reader of a graph's text has to allow."""
    return {node.target.namespace for node in graph.nodes if isinstance(node.target, OpOverload)} - set(OWN)
