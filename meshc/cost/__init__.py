"""The cost model: what a per-rank program takes, in seconds and bytes, by figures of the device and of its links."""
