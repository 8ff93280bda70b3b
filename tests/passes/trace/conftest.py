"""What these tests compile alike, for other meshes, plans and schedules, is traced once a file."""

from tests.one_trace import one_trace, patches_behind, traces  # noqa: F401
