"""What differs between machines and releases: versions, targets, Triton's moved names, known issues."""
