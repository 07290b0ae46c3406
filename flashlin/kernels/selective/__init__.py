"""The short convolution: causal, one filter per channel."""
