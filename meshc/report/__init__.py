"""What is said of a program: its summary and account."""
