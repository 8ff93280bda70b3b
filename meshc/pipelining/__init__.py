"""The language of pipeline schedules: lists of actions and messages, what is checked of them, what they cost, how they look."""
