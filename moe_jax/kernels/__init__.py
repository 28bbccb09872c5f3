"""Kernels of grouped products, each operation with a plain reference; `functional` chooses between them."""
