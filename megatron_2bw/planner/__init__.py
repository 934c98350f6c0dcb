"""The planner: which parallel configuration is fastest and fits. Pure Python, but for what measures and runs."""
