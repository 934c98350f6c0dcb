"""What stands around a run: planner, timelines, conversion, data, convergence, Slurm, checks of GPUs, demo."""
