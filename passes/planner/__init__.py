"""The planner: who splits what, found by search in place of the plan's words, with a bound on how much better it could be."""
