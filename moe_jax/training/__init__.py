"""The training program: recipes, data, the step, the loop around it, and its outputs.

`recipe` describes a run, `program` holds what it computes, `run.train` runs it, `compile_only` compiles it for absent
hardware, and `evaluation` scores held-out text, both in training and for `moe-jax eval`. `run_directory` holds what a
run leaves, `continuation` what may differ when it goes on, `restart` begins a run with a checkpoint of another one, and
`saved_model` reads the model of a checkpoint.
"""
