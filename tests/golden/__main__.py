"""Compare golden programs with what is compiled now, and accept what changed.

    python -m tests.golden [NAME ...]             each program that differs, its fingerprint's difference and the size of its text's
    python -m tests.golden --text [NAME ...]      with the text's difference
    python -m tests.golden --accept [NAME ...]    stores what is compiled now, after printing what that does to the fingerprints

Ends with 1 if a program differs and is not accepted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.golden.cases import CASES
from tests.golden.files import FOLDER, Golden


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.golden", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}; without any, all")
    parser.add_argument("--accept", action="store_true", help="store what is compiled now")
    parser.add_argument("--text", action="store_true", help="print differences of texts too")
    ask = parser.parse_args(arguments)
    unknown = [name for name in ask.names if name not in CASES]
    if unknown:
        parser.error(f"no golden program is called {', '.join(unknown)}; these are: {', '.join(CASES)}")
    differ = [name for name in ask.names or CASES if _compare(name, ask.accept, ask.text)]
    stale = sorted({file.stem for file in FOLDER.glob("*")} - {name.replace(" ", "_") for name in CASES})
    if stale:
        print(f"files of no program, remove them: {', '.join(stale)}")
    print(f"{len(differ)} of {len(ask.names or CASES)} differ" + (", accepted" if differ and ask.accept else ""))
    return int(bool(stale) or (bool(differ) and not ask.accept))


def _compare(name: str, accept: bool, show_text: bool) -> bool:
    """Whether the program differs from what is stored; prints how."""
    now, stored = Golden.of(CASES[name]().compiled), Golden.read(name)
    prints, text = ([], []) if stored is None else stored.differences(now)
    differs = stored is None or bool(prints or text)
    if differs:
        print(f"== {name}")
        if stored is None:
            print(f"new\n{now.fingerprint}")
        else:
            print("\n".join(prints) if prints else "the fingerprint is the same")
            print("\n".join(text) if show_text else f"{sum(line.startswith(('+', '-')) for line in text)} lines of the text differ")
        if accept:
            now.write(name)
    return differs


if __name__ == "__main__":
    sys.exit(main())
