"""What passes hand to each other: the request, the three phases, what is found out on the way; and what a pass is."""
