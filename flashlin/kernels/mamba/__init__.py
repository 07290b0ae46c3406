"""Steps of a Mamba layer while decoding: one token of the state space model, a few of the convolution. (Its
scan is kernels/simple_gla.)"""
