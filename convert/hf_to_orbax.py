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
    # A directory may be called Qwen2.5-7B; of a file the name ends before .gguf.
    targets = [out / (checkpoint.stem if checkpoint.is_file() else checkpoint.name) for checkpoint in checkpoints]
    if twice := {target.name for target in targets if targets.count(target) > 1}:
        raise moe_jax.InputError(
            f"several checkpoints are called {', '.join(sorted(twice))}: give each an OUT of its own"
        )
    for checkpoint, target in zip(checkpoints, targets, strict=True):
        if target.exists():
            print(f"{target} is there")
        else:
            model = moe_jax.convert(checkpoint, target)
            print(f"{target}: {model}")
    return targets


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except (moe_jax.InputError, FileNotFoundError) as error:
        sys.exit(f"{error}")
