"""The training program: recipes, the step, the loop around it, and its outputs.

`recipe` describes a run, `program` holds its model, optimizer and step, and `training_run` runs it. `run_directory`
holds the outputs of a run and says what may differ when it is continued, `restart` begins a run with a checkpoint of
another one, and `saved_model` writes the model at the end and reads that of a checkpoint.
"""
