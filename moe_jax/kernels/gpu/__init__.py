"""Kernels for NVIDIA GPUs: attention, and grouped products, plain or with kernels that are made inside the product."""
