"""Measurements: calibration, real runs of plans."""
