"""Run models of other packages raw and patched, under several stacks of package versions."""
