"""The commands of the command line, a file each: what one takes, and what it does."""
