"""Pure functions on arrays: no Flax, no I/O, no global state."""
