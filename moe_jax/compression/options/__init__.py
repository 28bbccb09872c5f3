"""The options of the methods of compression: what they are, and which values they may have, known without JAX."""
