"""Tools that test kernels: cases with float64 references, recorded launches, compilation without a GPU."""
