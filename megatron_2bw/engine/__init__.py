"""The 2BW engine on plain torch: a schedule's actions, weight versions, messages,
updates. See examples/plain_torch.py.

Nothing here imports Megatron, reads flags or prints.
"""
