"""Faults of a plan joined into one error, each with the user's line, and suggestions for words that are not known.

`reader.py` finds syntax errors, `plan.py` and `recipes.py` names that the mesh lacks, `passes/place/annotate.py` and `pins.py` names that
the model lacks.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Final

from meshc.errors import PlanError

SHOWN: Final = 50
"""Largest number of faults in one message."""

_NAMED: Final = "name modules as model.named_modules() does, with * for any text, or leave the line out"
NO_MODULE: Final = f"forward runs no operator in such a module; {_NAMED}"
NO_VALUE: Final = f"no module of this name returns a value; {_NAMED}"


def refuse_faults(what: str, faults: Sequence[str]) -> None:
    if faults:
        more = f"\n  and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        raise PlanError(f"{what}:" + "".join(f"\n  {fault}" for fault in faults[:SHOWN]) + more)


def suggest(word: str, words: Iterable[str]) -> str:
    known = list(words)
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else f" (there are: {', '.join(known)})"


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """How a message about an unknown name of the model goes on."""
    close = difflib.get_close_matches(word, list(words), 3, 0.4)
    return f"; did you mean {', '.join(close)}?" if close else ""
