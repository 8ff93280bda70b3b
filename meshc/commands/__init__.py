"""Commands of the command line, one file each: arguments and action."""
