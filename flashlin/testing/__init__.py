"""What proves the kernels: cases against the float64 reference, recorded launches, compiling without a
GPU."""
