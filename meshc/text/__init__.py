"""Text format of programs: printer, parser, and the operators that a text may name."""
