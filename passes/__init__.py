"""Compiler passes, one file each, from one compilation phase to the next; `pipeline.py` lists their order."""
