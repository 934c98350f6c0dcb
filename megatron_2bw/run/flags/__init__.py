"""The command line: flags, parsing, checks."""
