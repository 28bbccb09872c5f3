"""The commands of `moe-jax`, one module each; JAX is imported inside `run`, so that `--help` answers at once."""
