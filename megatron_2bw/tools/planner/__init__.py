"""The planner: the fastest parallel configuration that fits. Only measuring and running
need more than pure Python."""
