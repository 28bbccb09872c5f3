"""The training program: recipes, data, the step, the loop around it, and its outputs.

`recipe` describes a run, `program` holds its model, optimizer and step, and `run.training_run` runs it.
`run.run_directory` holds the outputs of a run, `run.continuation` checks what may differ when a run is continued,
`run.restart` begins a run with a checkpoint of another one, and `run.saved_model` reads the model of a checkpoint.
"""
