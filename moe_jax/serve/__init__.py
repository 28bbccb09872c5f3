"""A server of the OpenAI protocol, for models that no other server loads.

`scheduler` has the thread that answers all requests together, `openai` what is asked for and what becomes of it, and
`app` the HTTP side.
"""
