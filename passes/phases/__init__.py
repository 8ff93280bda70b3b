"""What passes hand to each other: the request, the draft, and what they find out on the way."""
