"""megatron-2bw gpu-check: what a user runs first on a new cluster. `rows` is the list
of checks, `runner` runs it."""
