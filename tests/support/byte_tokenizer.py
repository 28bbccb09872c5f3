"""A tokenizer whose tokens are bytes."""

from pathlib import Path

import tokenizers

BOS, EOS = 256, 257


def byte_tokenizer(path: Path, *, adds_bos: bool = False) -> Path:
    """Writes a tokenizer.json whose ids are bytes; `<s>` is 256, `</s>` is 257."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    # ByteLevel shows the printable bytes as themselves and the others as code points from 256 on, in order.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shown = {byte: chr(byte) for byte in printable}
    for offset, byte in enumerate(byte for byte in range(256) if byte not in shown):
        shown[byte] = chr(256 + offset)
    assert set(shown.values()) == set(alphabet)
    vocab = {character: byte for byte, character in shown.items()}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    assert tokenizer.token_to_id("<s>") == BOS and tokenizer.token_to_id("</s>") == EOS
    if adds_bos:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    tokenizer.save(str(path))
    return path
