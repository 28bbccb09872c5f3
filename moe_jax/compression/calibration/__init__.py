"""What is known of the experts from running the model on a text."""
