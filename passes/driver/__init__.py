"""The list of passes, what runs them, and what is done after each."""
