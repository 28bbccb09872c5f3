"""Reports of a run while it goes on: metrics, TensorBoard, Weights & Biases, traces."""
