"""What a run reports while it goes on: metrics, TensorBoard, Weights & Biases, traces."""
