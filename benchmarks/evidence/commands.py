"""The commands as a user types them, run in this process."""

import contextlib
import io
from pathlib import Path

from moe_jax.commands.cli import main

ERROR = "moe-jax: error: "
RECIPE = """
run_dir = "unset"
[model]
path = "unset"
[data]
seq_len = {seq_len}
sources = [{{ path = "{text}" }}]
[optimizer]
learning_rate = {learning_rate}
[schedule]
warmup_steps = {warmup_steps}
[train]
steps = {steps}
batch_size = 8
[log]
every = 1000
"""


def run(*words: object) -> str:
    """Runs a command.

    Args:
      words: of the command line, after `moe-jax`.

    Returns:
      What it printed on standard output.

    Raises:
      SystemExit: if the command fails.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main([str(word) for word in words])
    if code:
        raise SystemExit(f"moe-jax {' '.join(map(str, words))} failed with exit code {code}")
    return printed.getvalue()


def refusal(*words: object) -> str | None:
    """Runs a command that may refuse; the line in which it says why, or None."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main([str(word) for word in words])
    if not code:
        return None
    lines = [line for line in said.getvalue().splitlines() if line.startswith(ERROR)]
    if not lines:
        raise SystemExit(f"moe-jax {' '.join(map(str, words))} failed without a word: {said.getvalue()[-400:]}")
    return lines[-1].removeprefix(ERROR)


def write_recipe(file: Path, text: Path, *, seq_len: int, learning_rate: float, warmup_steps: int, steps: int) -> Path:
    """Writes a training recipe; `model.path` and `run_dir` are to be set where it is used.

    Args:
      file: to write.
      text: to train on, in batches of 8 rows of `seq_len` tokens.
      learning_rate: after `warmup_steps`.
      steps: in all.

    Returns:
      `file`.
    """
    file.write_text(
        RECIPE.format(text=text, seq_len=seq_len, learning_rate=learning_rate, warmup_steps=warmup_steps, steps=steps)
    )
    return file
