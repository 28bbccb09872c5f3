"""Text that every Python installation has, the source of its standard library, and a byte tokenizer for it."""

import sysconfig
from pathlib import Path

import tokenizers

BOS, EOS = "<bos>", "<eos>"
# One in this many files is held out.
HELD_OUT_EVERY = 10


def write_text(folder: Path, held_out_bytes: int) -> tuple[int, int]:
    """Copies the library's top-level modules: `train/*.txt`, and `held-out.txt` made of other files.

    Args:
      folder: created.
      held_out_bytes: the approximate amount of held-out text.

    Returns:
      Bytes of training and of held-out text.
    """
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    (folder / "train").mkdir(parents=True)
    trained, held_out = 0, ""
    for index, module in enumerate(modules):
        text = module.read_text(encoding="utf-8", errors="replace")
        if index % HELD_OUT_EVERY != 0:
            trained += (folder / "train" / f"{module.stem}.txt").write_bytes(text.encode())
        elif len(held_out) < held_out_bytes:
            held_out += text[: held_out_bytes - len(held_out)]
    return trained, (folder / "held-out.txt").write_bytes(held_out.encode())


def byte_tokenizer() -> tokenizers.Tokenizer:
    """A tokenizer whose tokens are the 256 bytes, after BOS (id 0) and EOS (id 1)."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = [BOS, EOS, *alphabet]
    model = tokenizers.models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return tokenizer
