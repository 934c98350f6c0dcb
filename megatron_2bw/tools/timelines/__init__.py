"""Schedules in time: simulated, drawn, traced."""
