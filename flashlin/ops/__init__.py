"""The drop-in functions, one module per family, named as in ``fla.ops``."""
