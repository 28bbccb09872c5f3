"""Hugging Face checkpoints and GGUF files become model directories.

    python convert/hf_to_orbax.py CHECKPOINT [CHECKPOINT ...] OUT

OUT gets a model directory for each checkpoint, of its name. Those that are there already are left as they are, so that
the same command goes on after an interruption.
"""

import sys
from pathlib import Path

import moe_jax


def main(*arguments: str) -> list[Path]:
    """Returns the model directories."""
    *checkpoints, out = map(Path, arguments)
    made = []
    for checkpoint in checkpoints:
        target = out / checkpoint.stem
        if target.exists():
            print(f"{target} is there")
        else:
            model = moe_jax.convert(checkpoint, target)
            print(f"{target}: {model}")
        made.append(target)
    return made


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except (moe_jax.InputError, FileNotFoundError) as error:
        sys.exit(f"{error}")
