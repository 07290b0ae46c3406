"""Programs of other packages, raw and patched: what each stack of versions gives for each model."""
