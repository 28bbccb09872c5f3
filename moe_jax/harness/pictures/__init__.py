"""Questions about pictures: where the pictures come from, and the sets that models are compared on."""
