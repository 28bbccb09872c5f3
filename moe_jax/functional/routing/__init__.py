"""From a router's logits to rows sorted by expert, and back."""
