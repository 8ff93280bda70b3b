"""Command line `meshc`, or `python -m meshc`: one command is run; an error is one message on stderr and exit code 1.

    meshc compile model.py:build --mesh dp=2,tp=2 --out llama.meshc      no process group, no GPU needed
    meshc plan model.py:build --devices 512 --device h100 --node 8       which mesh and which plan, without any device
    meshc show llama.meshc --summary
    meshc report llama.meshc                                             one page of HTML: what was decided, and why
    meshc explain model.py:build lm_head.weight --mesh dp=2,tp=2         why it lies as it does, and what else it could
    meshc diff ddp fsdp --model model.py:build --mesh dp=4               what two plans, or two saved programs, differ in
    meshc verify llama.meshc --model model.py:build
    meshc prove llama.meshc                                              that what each rank runs is the traced graph, at full size
    torchrun --nproc-per-node 4 -m meshc run llama.meshc --inputs x.safetensors --outputs out/
    torchrun --nproc-per-node 4 -m meshc run train.meshc --inputs 0.safetensors 1.safetensors --outputs out/ --save-state state/
    meshc calibrate                                                      measure this machine; under torchrun its links too
    meshc doctor                                                         what of this machine works, what is missing, what to do

`model.py:build` is a function without arguments that returns what to compile and its example inputs: `(model, {"input_ids": ids})`, or
`(model, args, kwargs)`; a `meshc.TrainStep` may stand for the model. Only `compile`, `plan`, `explain`, `diff`, `verify` and `prove`
run that file;
nothing in a saved program is executed or unpickled.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import Final

from meshc import environment
from meshc.commands import calibrate, compile, diff, doctor, explain, plan, prove, report, run, show, verify
from meshc.commands.target import harmless
from meshc.errors import MeshcError

COMMANDS: Final[dict[str, tuple[ModuleType, str]]] = {
    "compile": (compile, "compile a model for a mesh and save the program"),
    "show": (show, "print a saved program"),
    "report": (report, "a saved program as one page of HTML: what was decided, and why"),
    "plan": (plan, "how a model is best run on so many devices, without them: which mesh, which plan, what it takes"),
    "explain": (explain, "why a parameter lies, or an operator is split, as it is; what else it could be, and at which price"),
    "diff": (diff, "what two plans for a model, or two saved programs, differ in"),
    "verify": (verify, "compare a saved program with its model, all ranks simulated in this process"),
    "prove": (prove, "prove that a saved program is its traced graph, at full size, without running either"),
    "run": (run, "run a saved program; under torchrun, one process a rank"),
    "calibrate": (calibrate, "measure this machine for predicted times; under torchrun, its links too"),
    "doctor": (doctor, "versions, devices, processes that reach each other: what works, what is missing, what to do"),
}
READ_PROGRAMS: Final = ("show", "report", "diff", "verify", "prove", "run")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Errors are one message on stderr and exit code 1; MESHC_LOG=debug adds the traceback."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads the output has read enough, as `| head` has; what is left in its buffer goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (MeshcError, OSError) as error:
        if environment.debugging():
            traceback.print_exc()
        print(harmless(f"meshc {options.command}: {error}"), file=sys.stderr, flush=True)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser("meshc", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, told) in COMMANDS.items():
        command = commands.add_parser(name, help=told)
        module.arguments(command)
        command.set_defaults(run=module.run)
        if name in READ_PROGRAMS:
            told = "trust the operators of a library beside torch's and meshc's; its module is imported"
            command.add_argument("--allow", metavar="LIBRARY[=MODULE]", nargs="+", default=[], help=told)
            told = "accept texts that were edited after saving; `run` proves them first"
            command.add_argument("--allow-edited", action="store_true", help=told)
    return parser


if __name__ == "__main__":
    sys.exit(main())
