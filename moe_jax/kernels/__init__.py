"""Kernels of grouped products, each operation beside its plain reference; `functional` picks them."""
