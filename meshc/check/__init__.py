"""The one checker of a program's text: `show`, `verify`, `run` and loading share it.

    program.py       `check_program`: ports, constants, stages and schedule against each other
    stage.py         a stage, a line at a time: what each is declared to be against what its operator makes of its operands
    starts.py        collectives that start while the microbatches run
    regions.py       what is compiled as one
    types.py         what a declared type may be: extents, dtypes, shardings that fit the axes and the local shape
    operators.py     an operator on operands without values
    placed.py        the functions of `meshc.ir.spmd`: collectives, tiles, integers
    follow.py        a stage, a line at a time: the sharding of each value against what its operator makes of its operands'
    spread.py        how a value lies on the ranks, as far as it is known
    ruled.py         what an operator makes of that, by its rule; asked.py  how a rule is asked about a rank's tiles
    handed.py        what is known of values that stages hand to each other
    viewed.py        what views and cuts make of it;  moved.py  what collectives and tiles do
    bucketed.py       the order of elements of what travels with others
    padding.py       what padding holds, and who may take it in;  indices.py  for which rows an index is looked at
    tiles.py         an index as a place in a rank's tile of the rows;  draws.py  which tile is drawn
    orders.py        in which order tiles lie, which operators take, and the exchange that changes it
    memory.py        what is read after it was overwritten, and what leaves in one memory
    phases.py        forward reads nothing of backward, neither of them anything of the update
    info.py          what a program says beside its text: seed, optimizer's numbers, arithmetic
    guards.py        operators whose kernels trust values: what is asked of these before each call
    trusting.py      which these are, with what must hold, in the rules of rules.py
    failed.py        what fails at run time all the same, by file and line

Which operators a text may name at all stands in `meshc/text/operators.txt` (`meshc/text/allowed.py`). Whatever is wrong is an
ArtifactError that names file and line, before anything runs.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshc.check.program import check_program

__all__ = ["check_program"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The checker comes with rules for all operators, which those of its files that run beside a program do without."""
        if name != "check_program":
            raise AttributeError(f"module 'meshc.check' has no attribute {name!r}")
        return importlib.import_module("meshc.check.program").check_program
