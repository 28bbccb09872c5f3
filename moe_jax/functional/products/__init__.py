"""Products of activations and kernels: plain, grouped, and with kernels that are synthesised tile by tile."""
