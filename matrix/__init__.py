"""The version matrix: compile every public op for every Triton release and GPU, and publish the results."""
