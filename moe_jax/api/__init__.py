"""The verbs of `import moe_jax`, one file for each kind. The commands call the same functions."""
