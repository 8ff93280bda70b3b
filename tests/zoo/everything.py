"""All that transformers lists for four tasks (`listed.py`), each as a training step on simulated ranks beside one device; and its table.

    python -m tests.zoo.everything [--only causal,"image vit"] [--limit-seconds T] [--fresh] [--write]

How they are tried, and what the options mean, says `trying.py`.
"""

from __future__ import annotations

import sys
from functools import partial

from tests.zoo import trying
from tests.zoo.listed import Listed, case, listed
from tests.zoo.trying import MESH, Section, Trial

TEXT = f"""\
Written by `make zoo-all` (`python -m tests.zoo.everything`): each model type that the installed transformers lists for causal,
masked and sequence-to-sequence language models and for image classification, shrunk from its own configuration as far as it
builds (`tests/zoo/listed.py`); a training step with AdamW on simulated `{MESH}`, in float64, beside one device.
"""


def trial(one: Listed) -> Trial:
    return Trial(one.task, one.type, partial(case, one))


def section() -> Section:
    return Section("zoo-all", "All that transformers lists", TEXT, [trial(one) for one in listed()])


if __name__ == "__main__":
    sys.exit(trying.run("tests.zoo.everything", __doc__, section()))
