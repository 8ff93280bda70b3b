"""Pipeline stages: a per-rank graph cut along its data flow. `cut_stages.py` is the pass; the other files are its parts."""
