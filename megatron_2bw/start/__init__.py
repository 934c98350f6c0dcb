"""How a run starts and ends."""
