"""Pass pipeline, its runner, the searches over its choices, and the hooks after each pass."""
