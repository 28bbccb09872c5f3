"""Pictures of examples: where they are, which message shows which, and how they are read."""
