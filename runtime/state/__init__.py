"""A model's parameters, buffers and optimizer state as ranks hold them."""
