"""A model becomes a Hugging Face directory, which is compared with the checkpoint that it came from.

    python convert/orbax_to_hf.py MODEL OUT [CHECKPOINT]

With CHECKPOINT, every tensor of OUT must have the same bits as there; for a model that was only converted.
"""

import sys
from pathlib import Path

import moe_jax


def main(model: str, out: str, checkpoint: str | None = None) -> int:
    """Returns the number of tensors that were compared."""
    folder = moe_jax.export(model, out)
    print(f"{folder}: {', '.join(sorted(file.name for file in folder.iterdir()))}")
    if checkpoint is None:
        return 0
    there, here = tensors(Path(checkpoint)), tensors(folder)
    differ = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
    if differ:
        raise moe_jax.InputError(f"{len(differ)} tensors differ from {checkpoint}, the first is {differ[0]}")
    print(f"{len(here)} tensors are those of {checkpoint}, bit for bit")
    return len(here)


def tensors(folder: Path) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """Returns the shape and the bytes of every tensor in the safetensors files of a folder."""
    from safetensors.numpy import load_file  # `pip install safetensors`; needed for the comparison alone

    files = sorted(folder.glob("*.safetensors"))
    return {name: (array.shape, array.tobytes()) for file in files for name, array in load_file(file).items()}


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except (moe_jax.InputError, FileNotFoundError) as error:
        sys.exit(f"{error}")
