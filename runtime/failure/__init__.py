"""Failure handling: heartbeats and detection of dead, late or silent ranks, the failure board, comparison of step numbers."""
