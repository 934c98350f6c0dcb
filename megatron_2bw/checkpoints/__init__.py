"""What checkpoints hold, and the folder that they lie in."""
