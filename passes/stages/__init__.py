"""Per-rank graph cut into stages: chunks of the head, microbatches, stages of a pipeline, and forward and backward.

`write_chunks.py`, `split_microbatches.py`, `cut_stages.py` and `cut_backward.py` are passes; most other files are parts of `cut_stages.py`.
Others import `attempt`, `cut_stages`, `pipeline_memory`, `pipeline_shape`, `schedules` and `write_chunks`.
"""
