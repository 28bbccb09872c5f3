"""Kernels for NVIDIA GPUs: grouped products, plain or with kernels that are made inside the product; attention."""
