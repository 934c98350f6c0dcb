"""Flags of Megatron for a host without Transformer Engine and Apex."""

# What runs on any host: without Transformer Engine and Apex.
PLAIN_TORCH = """
    --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-rope-fusion
""".split()
