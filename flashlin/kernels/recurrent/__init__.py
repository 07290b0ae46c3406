"""The kernels of all fused_recurrent ops: one generic recurrence, computed token by token."""
