"""From activations to losses and to the next token."""
