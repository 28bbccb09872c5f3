"""Recovery after a compression: small parameters of the compressed model learn the logits of the original."""
