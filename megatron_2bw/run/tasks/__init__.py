"""Models, datasets and forward steps for Megatron's `pretrain`."""
