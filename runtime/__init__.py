"""The runtime: executes a program, on real processes or on simulated ranks. It knows no pass."""
