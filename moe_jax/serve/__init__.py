"""A server of the OpenAI protocol, for models that no other server loads.

`rows` has the compiled programs, `engine` the thread that runs them for all requests together, `requests` what is asked
for, `answer` what becomes of it, and `app` the HTTP side.
"""
