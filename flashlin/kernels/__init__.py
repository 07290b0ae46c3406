"""The kernels: a folder for each family of ops, with its recipe, kernels, torch path and reference."""
