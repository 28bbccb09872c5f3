"""The architectures of GGUF files: keys of their metadata and tables of their tensors."""
