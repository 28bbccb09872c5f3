"""Products with sparse kernels: entry by entry, as they are stored, and by column, as a CPU generates with them."""
