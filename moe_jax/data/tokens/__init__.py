"""Text to tokens: tokenizers, chat templates, and tokenising in advance."""
