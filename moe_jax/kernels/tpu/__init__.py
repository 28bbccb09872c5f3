"""Grouped products on TPU, in Pallas: plain ones, and products with kernels that are made in fast memory."""
