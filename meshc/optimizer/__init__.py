"""What an optimizer's update is, found by tracing or trying its step."""
