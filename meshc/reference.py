"""One device that draws as meshc's ranks do: `meshc.frontend.reference_random`, under the name that users import."""

from meshc.frontend.reference_random import Microbatch, ReferenceRandom

__all__ = ["Microbatch", "ReferenceRandom"]
