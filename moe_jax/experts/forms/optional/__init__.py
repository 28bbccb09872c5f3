"""What a form may offer beside the four methods that every form has: a class for each, and how to ask for it."""
