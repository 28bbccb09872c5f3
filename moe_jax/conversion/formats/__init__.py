"""Files of weights in other formats, read and written in ranges: safetensors, PyTorch, packed codes."""
