"""Layers of the sizes of real models, with weights that are drawn, for `true_layers.py`."""
