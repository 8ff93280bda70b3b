"""Keys of calls, from the Python values that a model's traces have read (`meshc.frontend.read_values`), and texts of changed values.

    first call      nothing is known yet         compiled: what its trace has read is known from here on, and is part of its key
    like it         all as it was                the same key
    temperature = 2 something is not as it was   another key: compiled, or found again
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from torch import nn

from meshc.api.compilation_result import CompilationResult
from meshc.api.compile_arguments import CompilationKey
from meshc.frontend import read_values
from meshc.frontend.module_watch import ModuleState
from meshc.frontend.read_places import ReadPlace
from meshc.frontend.read_values import Number, Reads, Values


class ValueKeys:
    """Keys of one program's calls. `base` is a key without Python values."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._all: dict[tuple[tuple[ReadPlace, ...], tuple[Number, ...]], Reads] = {}
        self._of: dict[CompilationKey, list[Reads]] = {}
        """By base: what its compilations have read, the last first: a branch may read more than the other."""
        self._last: Reads | None = None
        self._ran: dict[Reads, Values] = {}
        """At the last call."""
        self._changed: set[ReadPlace] = set()
        """Numbers whose change has caused a compilation."""
        self.inputs: tuple[ReadPlace, ...] = ()
        """Where numbers stand that have changed again, and are inputs of what is compiled from then on."""
        self._fixed: set[ReadPlace] = set()
        """Those of them that no program could take."""

    @property
    def count(self) -> int:
        """Number of values that a call like the last one reads."""
        return 0 if self._last is None else len(self._last)

    def key(self, base: CompilationKey, kept: Container[CompilationKey], state: ModuleState | None = None) -> CompilationKey:
        """Key of a call: that of a kept compilation, if the values it has read are unchanged. state: the model's, if its watch has just
        found it."""
        known = self._of.get(base)
        if known is None:
            known = [] if self._last is None else [self._last]
        found = base
        for reads in known:
            values = reads.values(state)
            key = values.keys.get(base)
            if key is None:
                key = values.keys[base] = replace(base, values=values)
            if key in kept:
                return key
            found = key if found is base else found
        return found

    def learn(self, base: CompilationKey, made: CompilationResult) -> tuple[CompilationKey, Reads]:
        """The key of a new compilation, and the values that it has read."""
        read = made.reads, made.numbers
        reads = self._all.get(read)
        if reads is None:
            reads = self._all[read] = Reads(made.reads, self._model, made.request.function, made.numbers)
        taken = {one.place for one in made.numbers}
        if made.kept_fixed:
            self._fixed |= {place for place in self.inputs if place not in taken}
            self.inputs = tuple(place for place in self.inputs if place in taken)
        known = self._of.setdefault(base, [])
        if reads in known:
            known.remove(reads)
        known.insert(0, reads)
        return replace(base, values=reads.values()), reads

    def note(self, key: CompilationKey) -> None:
        """Records that a call with this key runs."""
        if self._last is not None and self._ran.get(self._last) is key.values:
            return
        for reads in self._all.values():
            if key.values is not None and reads.places is key.values.places:
                self._last, self._ran[reads] = reads, key.values

    def changes(self, key: CompilationKey) -> list[str]:
        """Values changed since the last call whose program reads the same places, one line each."""
        return [line for now, then in self._since_last(key) for line in now.changes(then)]

    def open(self, key: CompilationKey) -> None:
        """Before a compilation for what has changed: numbers that have changed before are to be inputs of it."""
        for now, then in self._since_last(key):
            for place in now.numbers_changed(then):
                if place in self._changed and place not in self._fixed and place not in self.inputs:
                    self.inputs = (*self.inputs, place)
                self._changed.add(place)

    def _since_last(self, key: CompilationKey) -> list[tuple[Values, Values]]:
        """The values of a key, and others that a program which reads the same places had at its last call."""
        now = key.values
        return [(now, then) for reads, then in self._ran.items() if now is not None and now is not then and reads.places is now.places]

    def stale(self) -> list[str]:
        """Values changed since the last call, of all that any program has read."""
        return [line for reads, then in self._ran.items() for line in reads.values().changes(then)]


def changes_from(kept: Iterable[CompilationKey], key: CompilationKey) -> list[str]:
    """What has changed since the first of `kept` that is for such inputs and has read the same, one line each: why it does not serve."""
    for other in kept:
        if key.values and other.values and other.values.places is key.values.places and other.inputs == key.inputs:
            return key.values.changes(other.values)
    return []


def fixed_numbers_note(wanted: Sequence[ReadPlace], made: CompilationResult) -> str:
    """Text of a warning about numbers that keep changing and cannot be inputs."""
    taken = {one.place for one in made.numbers}
    names = [read_values.name_at(place, made.request.module, made.request.function)[0] for place in wanted if place not in taken]
    return (
        f"{changes_text(names)} keeps changing, and cannot be an input of the program, which is compiled for each value: "
        f"{made.kept_fixed}\n"
        "  what to do: nothing, if it takes few values; else compute with it (multiply, divide, add, compare with a constant), or pass a\n"
        "  tensor of no dims as an argument"
    )


def changes_text(lines: Sequence[str], most: int = 5) -> str:
    """The first `most` lines joined, with the number of the others."""
    return "; ".join(lines[:most]) + (f"; and {len(lines) - most} more" if len(lines) > most else "")
