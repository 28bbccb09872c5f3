"""The bytes of single tokens. A character may be spread over several of them, none of which has a text of its own."""

import re

import tokenizers

from moe_jax.data.tokens.tokenizer_bounds import components


def _characters() -> dict[int, str]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


CHARACTER_OF_BYTE = _characters()
"""The printable character that stands for each byte in a tokenizer.json of bytes (GPT-2's)."""

_BYTE_OF_CHARACTER = {character: byte for byte, character in CHARACTER_OF_BYTE.items()}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # of SentencePiece


class TokenBytes:
    """Returns the bytes that tokens add to a text when they are called by their ids.

    Those of all tokens of a text, joined, are the text in UTF-8. Special tokens have none, as they are no part of it.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self._tokenizer = tokenizer
        self._special = {id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        steps = {step["type"] for step in components(tokenizer.decoder, "decoders")}
        self._of_bytes, self._has_bytes = "ByteLevel" in steps, "ByteFallback" in steps
        # Some decoders take the first space of a text away, so that a token's text is what it is after another.
        self._before = tokenizer.encode("a", add_special_tokens=False).ids[-1:]

    def __call__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special:
            return b""
        if self._of_bytes:
            if all(character in _BYTE_OF_CHARACTER for character in token):
                return bytes(map(_BYTE_OF_CHARACTER.__getitem__, token))
            return token.encode()  # a token that was added
        if self._has_bytes and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        decode = self._tokenizer.decode
        return decode([*self._before, token_id]).removeprefix(decode(self._before)).encode()
