"""Settings of all tests: properties are tried on the same examples in every run, and none of them is judged by the clock. What
`meshc calibrate` has measured on a developer's machine plays no part."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile("meshc", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("meshc")

os.environ["MESHC_DEVICES"] = os.devnull
