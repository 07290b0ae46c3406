"""One folder per family: recipe, kernels, torch path, reference."""
