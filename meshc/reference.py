"""Reference random numbers on one device, as ranks draw them: `meshc.frontend.reference_random`, under the name that users import."""

from meshc.frontend.reference_random import Microbatch, ReferenceRandom

__all__ = ["Microbatch", "ReferenceRandom"]
