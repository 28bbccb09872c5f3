"""Kernels in fewer bytes: pruned, factored, quantised, and what each form takes on the disk."""
