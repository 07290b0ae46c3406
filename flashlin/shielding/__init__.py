"""The care that our own kernels get, for kernels of a user: a launcher, a function that launches several, an
autotuner."""
