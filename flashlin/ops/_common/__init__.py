"""What several ops share: check, plan, and run a family of kernels or its torch path, eagerly or traced."""
