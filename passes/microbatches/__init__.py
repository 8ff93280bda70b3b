"""A step cut into microbatches."""
