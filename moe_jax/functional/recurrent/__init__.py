"""Pure functions of layers that carry a state from token to token."""
