"""Schedules against times: simulated, drawn, traced."""
