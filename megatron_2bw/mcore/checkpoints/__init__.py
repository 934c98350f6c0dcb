"""The content of checkpoints, and their folder."""
