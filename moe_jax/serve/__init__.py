"""A server of the OpenAI protocol, for models that no other server loads."""
