"""The training program: recipes, data, the step, the loop around it, and what it leaves behind.

`recipe` says what a run is, `program` what it computes, `run.train` runs it, `compile_only` compiles it for hardware
that is not there, `evaluation` scores held-out text for training and for `moe-jax eval` alike.
"""
