"""One entry: its sample calls are captured, and every node in them is proved once."""

from __future__ import annotations

import time
from typing import Any

from meshc.testing.brute_force import Sample, build, prove
from meshc.text.allowed_operators import refusal, spelling
from tests.conformance.capture import NotCapturable, nodes, said
from tests.conformance.torch_samples import calls

SAMPLES = 4
"""Sample calls of an entry that are tried."""
MOST_PAIRS = 16
"""Splits over two axes that are tried of a node, of those that its rule allows."""

EXACT, REPLICATED, REFUSED, UNCAPTURABLE, WRONG = "exact", "replicated", "refused", "not capturable", "wrong"
NOT_ALLOWED = "may not stand in a program"


class Conformance:
    """What has been proved, so that no two calls that are the same to a rule are proved twice."""

    def __init__(self) -> None:
        self.proved: dict[str, int] = {}
        self.wrong: dict[str, str] = {}

    def run(self, name: str, entry: Any, count: int = SAMPLES, seed: int = 0) -> dict[str, Any]:
        """The entry's row: what became of it, how many calls and nodes and splits that was, and what stands in its way."""
        begin = time.process_time()
        row: dict[str, Any] = {"name": name, "calls": 0, "nodes": 0, "splits": 0}
        whole: set[str] = set()
        wrong: list[str] = []
        refused: list[str] = []
        try:
            for call in calls(entry, count, seed):
                try:
                    found = nodes(call)
                except NotCapturable as error:
                    refused.append(str(error))
                    continue
                row["calls"] += 1
                for sample in found:
                    self._node(sample, row, whole, wrong, refused)
        except Exception as error:  # torch's own sample functions ask for packages and devices
            refused.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}")
        if wrong:
            row["status"] = WRONG
        elif refused and (not row["nodes"] or any(" draws " in reason for reason in refused)):
            row["status"] = UNCAPTURABLE
        elif any(NOT_ALLOWED in reason for reason in refused):
            row["status"] = REFUSED
        else:
            row["status"] = REPLICATED if whole else EXACT
        row.update(whole=sorted(whole), wrong=wrong, reasons=sorted(set(refused)), seconds=round(time.process_time() - begin, 1))
        return row

    def _node(self, sample: Sample, row: dict[str, Any], whole: set[str], wrong: list[str], refused: list[str]) -> None:
        why = refusal(sample.op)
        if why is not None and "torch's generator" in why:
            refused.append(f"{spelling(sample.op)} draws from torch's generator; programs draw by meshc.random")
            return
        if why is not None:
            refused.append(f"{spelling(sample.op)} {NOT_ALLOWED}: {why}")
            return
        row["nodes"] += 1
        key = said(sample)
        if key not in self.proved and key not in self.wrong:
            try:
                self.proved[key] = prove(sample, MOST_PAIRS) if build(sample).instance.known else 0
            except Exception as error:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
                self.wrong[key] = f"{key}: {type(error).__name__}: {lines[0]}"[:600]
        if key in self.wrong:
            wrong.append(self.wrong[key])
        elif self.proved[key]:
            row["splits"] += self.proved[key]
        else:
            whole.add(spelling(sample.op))
