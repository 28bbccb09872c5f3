"""Runs commands in a process of its own, whose environment says where the Hub is: `python hub_commands.py JSON`.

Prints one JSON object a command: its exit code, and what it said on standard error.
"""

import contextlib
import io
import json
import sys

from moe_jax.commands.cli import main

if __name__ == "__main__":
    for words in json.loads(sys.argv[1]):
        said, printed = io.StringIO(), io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
            code = main(words)
        print(json.dumps({"code": code, "said": said.getvalue(), "printed": printed.getvalue()}))
