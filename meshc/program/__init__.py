"""The program as data: stages, schedule, ports; substitution of sizes; instructions of ranks; memory sharing."""
