"""What lies on the host while it is not used: optimizer state, and what backward reads of forward."""
