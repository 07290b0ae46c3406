"""The generic recurrence, token by token: every fused_recurrent op's kernels."""
