"""The program as data: stages, schedule, ports; at sizes; how microbatches and stages are played."""
