"""What only a GPU can show: kernels at sizes of real models, and whole programs; `make test-gpu` runs it."""
