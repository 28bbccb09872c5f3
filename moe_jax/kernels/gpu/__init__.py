"""Grouped products on NVIDIA GPUs: plain ones, and products with kernels that are made inside the product."""
