"""Products of few rows, such as those of one token, on a CPU: reading and converting kernels takes most of the time."""
