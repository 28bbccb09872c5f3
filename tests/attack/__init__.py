"""Broken and hostile inputs for everything that reads a file.

`attacks.py` says what a class of inputs is, `classes/` holds them, `mutations.py` what they share, and `trial.py`
tries them. The tests try a few hundred inputs of every class; `benchmarks/attack.py` tries as many as are asked for.
`planted/` has readers with every fault that a trial must find, `unbounded/` the library without single bounds, which
the classes must notice.
"""
