"""What Megatron asks of an entry script: models, datasets, forward steps."""
