"""The planner: which parallel configuration is fastest and fits. Pure Python; only `profile` and `validate` use torch."""
