"""What ranks must have alike, compared."""
