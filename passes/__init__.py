"""The compiler's passes: one file each, program in, program out. Their order stands in `pipeline.py`."""
