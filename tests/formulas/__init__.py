"""What programs send and compute by formulas that a person can check, beside what their graphs have."""
