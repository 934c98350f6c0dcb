"""Time and memory of a plan."""
