"""Methods that leave fewer experts, or narrower ones, each a full FFN."""
