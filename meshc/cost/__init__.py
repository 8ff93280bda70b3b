"""Cost model: predicted seconds and bytes of a per-rank program, from figures of the device and its links."""
