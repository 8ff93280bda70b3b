"""Public API: compile, save, verify, options."""
