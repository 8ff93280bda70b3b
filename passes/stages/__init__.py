"""Pipeline stages: a per-rank graph cut along its data flow. `cut_stages.py` is the pass; the other files are its parts.

Others import `attempt`, `cut_stages`, `pipeline_memory`, `pipeline_shape`, `schedules` and `write_chunks`.
"""
