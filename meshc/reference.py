"""One device that draws as meshc's ranks do: `meshc.frontend.reference`, under the name that users import."""

from meshc.frontend.reference import Microbatch, ReferenceRandom

__all__ = ["Microbatch", "ReferenceRandom"]
