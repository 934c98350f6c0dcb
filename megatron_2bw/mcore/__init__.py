"""Everything that knows Megatron's training loop."""
