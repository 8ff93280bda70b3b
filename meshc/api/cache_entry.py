"""Entry of one compilation in the on-disk cache: loaded from an earlier start of the job, or written for the next.

    Options(cache=...) ──> folder        key ──> the programs that were made under it        each has with it what its trace has read:
                                                                                             found here too, it is taken; else compiled

Rank 0 alone reads and writes: the others take its program as ever (`meshc.api.shared_compilation`). What runs is then the program that
rank 0 would have compiled, and ranks compare its hash as before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshc import environment, program_cache
from meshc.api import compilation_result, job_key
from meshc.api.compilation_result import CompilationResult
from meshc.errors import ArtifactError
from meshc.frontend.dependencies import Dependencies
from meshc.frontend.output_tree_data import NotPlainData
from meshc.options import Options
from meshc.passes.phases.request import Request


def folder(options: Options) -> Path | None:
    """Folder of cached programs; None if caching is off, or passes are dumped or verified."""
    if environment.dump_folder() is not None or environment.verifying():
        return None
    if options.cache is None:
        return environment.programs_folder()
    if isinstance(options.cache, bool):
        return program_cache.default_folder() if options.cache else None
    return Path(options.cache)


class CacheEntry:
    """Cache entry of one compilation."""

    def __init__(self, where: Path, options: Options, agreed: Mapping[str, str], request: Request) -> None:
        self._folder, self._request = where, request
        self._key, self._why = job_key.key(options, agreed, request), job_key.why_none(options)

    def load(self) -> tuple[CompilationResult, Dependencies] | None:
        """The cached program and its dependencies, if these are unchanged; None otherwise."""
        began, request, here = time.process_time(), self._request, compilation_result.process_values(self._request)

        def is_mine(told: Mapping[str, Any]) -> bool:
            read = Dependencies.from_json(told["dependencies"])
            return told["key"] == self._key and not any(read.differences(here)) and here.lines(read.values) == told["lines"]

        for name in program_cache.under(self._folder, self._key):
            found = program_cache.read_program(self._folder, name, is_mine)
            if found is None:
                continue
            seconds = {"taken from disk": time.process_time() - began}
            try:
                taken = CompilationResult.from_data(found.program, request, found.told, seconds)
            except NotPlainData:
                continue
            return taken, Dependencies.from_json(found.told["dependencies"])
        return None

    def keep(self, found: CompilationResult, read: Dependencies) -> CompilationResult:
        """Writes the program to the folder. Returns `found`, with a note of the reason if it cannot be written."""
        assert found.lowered is not None
        why = self._why or read.why
        if not why and found.lowered.backward is not None:
            why = "its backward is made anew for each set of outputs that receive gradients"
        if not why:
            depends = {
                "key": self._key,
                "dependencies": read.to_json(),
                "lines": compilation_result.process_values(self._request).lines(read.values),
            }
            name = program_cache.name_of(self._key, json.dumps(depends))
            try:
                why = program_cache.write(self._folder, name, found.with_traced_graph(found.program), {**depends, **found.extra_data()})
            except (ArtifactError, NotPlainData) as error:
                why = str(error)
        if not why:
            return found
        return replace(found, program=replace(found.program, notes=[*found.program.notes, program_cache.NOT_KEPT + why]))
