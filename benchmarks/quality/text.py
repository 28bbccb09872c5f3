"""The text that models are tuned to, and the part of it that is held out."""

from pathlib import Path


def split_text(data: Path, work: Path, held_out_share: float) -> tuple[Path, Path]:
    """Cuts the end off TinyShakespeare.

    Args:
      data: folder with `text/tinyshakespeare/input.txt`.
      work: folder that the two files are written to.
      held_out_share: of the characters.

    Returns:
      The files of the text to train on and of the text to score.
    """
    text = (data / "text" / "tinyshakespeare" / "input.txt").read_text()
    cut = round(len(text) * (1 - held_out_share))
    train, held_out = work / "train.txt", work / "held-out.txt"
    train.write_text(text[:cut])
    held_out.write_text(text[cut:])
    return train, held_out
