"""Start and end of a run."""
