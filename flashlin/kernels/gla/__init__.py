"""A decay for each key channel: gated linear attention and RWKV-6."""
