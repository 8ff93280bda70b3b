"""Pipeline schedules: their text form, checks, simulated timelines and drawings."""
