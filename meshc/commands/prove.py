"""`meshc prove`: proof that a saved program is its traced graph, at full size and without running either."""

from __future__ import annotations

import argparse

from meshc.commands.target import load_program, load_target
from meshc.commands.verify import compile_as_saved
from meshc.errors import ArtifactError, VerifyError
from meshc.proof.program_proof import prove


def arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", metavar="PATH", help="the folder of a saved program")
    told = "returns the model and example inputs: its graph is traced again, in place of the one that the program came with"
    command.add_argument("--model", metavar="FILE.py:FUNCTION", help=told)


def run(options: argparse.Namespace) -> None:
    saved = load_program(options.path, options)
    if options.model is not None:
        joint = compile_as_saved(saved, options.path, load_target(options.model), options.model).lowered.joint
        traced, constants, of = joint.as_stage(), joint.constants, f"the graph of {options.model}"
    elif saved.traced is not None:
        traced, constants, of = saved.traced.stage, saved.constants, "the graph that it came with"
    else:
        raise ArtifactError(
            f"{options.path} came without its traced graph: an older version has saved it, or the graph has operators that no text names\n"
            "  what to do: name its model, meshc prove PATH --model FILE.py:FUNCTION"
        )
    proof = prove(saved, traced, constants)
    if not proof.holds:
        raise VerifyError(f"against {of}: {proof}")
    print(f"against {of}: {proof}")
