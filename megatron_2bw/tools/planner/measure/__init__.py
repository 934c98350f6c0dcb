"""Measurements: profiles, calibration, real runs of plans."""
