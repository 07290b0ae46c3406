"""Shared code of the ops: check arguments, plan, and run kernels or plain torch, eagerly or traced."""
