"""Weights from Hugging Face's format to Megatron's checkpoints, and back."""
