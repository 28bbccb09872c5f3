"""The commands of `moe-jax`, one module each: a frozen dataclass `Options` and `run(options)`.

A module imports JAX inside `run`, so that `moe-jax COMMAND --help` answers at once.
"""
