"""Measured times: profiles, calibration, real runs of plans."""
