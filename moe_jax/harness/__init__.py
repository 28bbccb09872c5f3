"""Tasks of lm-evaluation-harness (lm-eval) on models of this library, and task files over local data.

lm-eval makes the prompts, knows the right answers, and counts; here are the log-likelihoods and texts that it asks for
(`language_model`), and the checks of what it may read (`task_files`). `pictures` has questions about pictures. It comes
with the extra `[eval]`.
"""
