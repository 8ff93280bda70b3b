"""Pipeline stages: a per-rank graph is cut along its data flow. `cut_stages.py` is the pass; the other files are its parts."""
