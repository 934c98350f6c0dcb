"""Slurm: the job scripts, their flags, and the status file of a job."""
