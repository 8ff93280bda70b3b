"""`meshc.TrainStep` as users construct one: also announces this rank to the others, which then learn when this rank ends."""

from __future__ import annotations

from functools import update_wrapper
from typing import TYPE_CHECKING, Any

from meshc.frontend import train_step
from meshc.runtime.failure.failed_rank import announce


class TrainStep(train_step.TrainStep):
    __doc__ = train_step.TrainStep.__doc__

    if not TYPE_CHECKING:  # a type checker sees what it takes

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            announce()
            super().__init__(*args, **kwargs)


update_wrapper(TrainStep.__init__, train_step.TrainStep.__init__)
