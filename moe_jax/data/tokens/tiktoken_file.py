"""Converts a vocabulary in tiktoken's format, lines of "base64-of-the-bytes rank", to a tokenizer.json.

tiktoken joins the two neighbours whose joined bytes have the lowest rank, the first of such pairs, until no two
neighbours have a rank. A tokenizer.json has merges instead: for each token, two tokens that it is joined from. They are
the tokens that remain when the bytes of a token are joined by lower ranks only, because the result for a stretch of
bytes does not depend on what surrounds it, as long as nothing is joined across its ends. So if two tokens always
remain, as in every vocabulary that was learned by joining, each token has one merge, and the merges in the order of
ranks give the same result.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from moe_jax.core.errors import InputError, first_sentence, shown
from moe_jax.data.tokens.token_bytes import CHARACTER_OF_BYTE
from moe_jax.files.regular_files import read_regular

# The largest vocabulary in use, of 200,000 tokens, has 4 MB and tokens of 128 bytes.
MAX_BYTES = 16 << 20
MAX_TOKEN = 256
# Joining a token takes steps by the square of its length; in the file of Qwen they are 13 million in all.
_MAX_STEPS = 200_000_000

# From `tokenization_qwen.py`, which also converts the text to Unicode's composed form first.
QWEN_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))


def qwen_tokenizer(file: Path) -> str:
    """Returns the content of a tokenizer.json that cuts texts as the first Qwen does with its `qwen.tiktoken`.

    The file has ranks 0, 1, ...; the special tokens have the ids after them.

    Raises:
      InputError: if it is too large, a line is not a token and its rank, tokens or ranks are missing or occur twice, or
        tokens are not joined from others.
    """
    ranks = read_ranks(file)
    merges = [(_as_characters(left), _as_characters(right)) for left, right in merges_of(file, ranks)]
    vocab = {_as_characters(token): rank for token, rank in ranks.items()}
    try:
        made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
        made.normalizer = normalizers.NFC()
        pieces = pre_tokenizers.Split(Regex(QWEN_PIECES), "isolated")
        of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([pieces, of_bytes])
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens([AddedToken(name, special=True, normalized=True) for name in QWEN_SPECIAL])
        return made.to_str()
    except Exception as error:  # the library raises bare exceptions
        raise InputError(f"{file} makes no tokenizer: {first_sentence(error)}") from None


def read_ranks(file: Path) -> dict[bytes, int]:
    """Returns the rank of every token, in the order of ranks: 0, 1, ... without a gap; every byte is a token."""
    tokens: dict[int, bytes] = {}
    for number, line in enumerate(read_regular(file, max_bytes=MAX_BYTES).splitlines(), start=1):
        if not line:
            continue
        token, rank = _token_and_rank(file, number, line)
        if rank in tokens:
            raise InputError(f"{file} line {number}: rank {rank} was given before")
        tokens[rank] = token
    missing = next((rank for rank in range(len(tokens)) if rank not in tokens), None)
    if missing is not None:
        raise InputError(f"{file} has {len(tokens)} tokens, but none of rank {missing}: it is damaged, fetch it again")
    ranks = {tokens[rank]: rank for rank in range(len(tokens))}
    if len(ranks) < len(tokens):
        raise InputError(f"{file} has a token twice: it is damaged, fetch it again")
    lost = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if lost is not None:
        raise InputError(f"{file} has no token for byte {lost}, which a text may hold: it is damaged, fetch it again")
    return ranks


def _token_and_rank(file: Path, number: int, line: bytes) -> tuple[bytes, int]:
    parts = line.split()
    try:
        token, rank = base64.b64decode(parts[0], validate=True), parts[1]
    except (binascii.Error, IndexError):
        token, rank = b"", b""
    if len(parts) != 2 or not token or not rank.isdigit() or len(rank) > 9:
        raise InputError(
            f"{file} line {number} is {shown(line[:80].decode(errors='replace'))}, "
            "expected a token in base64 and its rank"
        )
    if len(token) > MAX_TOKEN:
        raise InputError(f"{file} line {number}: a token of {len(token)} bytes, {MAX_TOKEN} are the most")
    return token, int(rank)


def merges_of(file: Path, ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Returns the two tokens that each token except single bytes is joined from, in the order of ranks."""
    if sum(len(token) ** 2 for token in ranks) > _MAX_STEPS:
        raise InputError(f"{file} has more long tokens than a vocabulary of words can have; it is damaged")
    merges = []
    for token, rank in ranks.items():
        if len(token) == 1:
            continue
        parts = _joined(token, ranks, below=rank)
        if len(parts) != 2:
            raise InputError(
                f"{file}: the token of rank {rank}, {shown(token.decode(errors='replace'))}, is not joined from two of "
                "lower rank, as in every vocabulary that was learned; it is damaged, fetch it again"
            )
        merges.append((parts[0], parts[1]))
    return merges


def _joined(token: bytes, ranks: Mapping[bytes, int], *, below: int) -> Sequence[bytes]:
    """Returns the tokens that remain of bytes when neighbours are joined by ranks below `below`."""
    parts = [token[i : i + 1] for i in range(len(token))]
    found = [ranks.get(left + right, below) for left, right in zip(parts, parts[1:], strict=False)]
    while found and (lowest := min(found)) < below:
        i = found.index(lowest)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
        del found[i]
        for j in (i - 1, i):
            if 0 <= j < len(found):
                found[j] = ranks.get(parts[j] + parts[j + 1], below)
    return parts


def _as_characters(token: bytes) -> str:
    return "".join(map(CHARACTER_OF_BYTE.__getitem__, token))
