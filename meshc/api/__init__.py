"""The public face: compile, save, verify, options."""
