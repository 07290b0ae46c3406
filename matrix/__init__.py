"""The version matrix: every public op under every Triton release for every card, and the pages made of what
is found."""
