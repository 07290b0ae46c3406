"""Linear attention with a decay for each key channel: gated linear attention and RWKV-6."""
