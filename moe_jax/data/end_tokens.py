"""The tokens that end a text, wherever a model names them: chat models end their turns with a token of their own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_jax.core.errors import InputError, shown
from moe_jax.data.chat_template import find_chat_template, read_settings, special_tokens
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.files.json_toml import ANYTHING, read_json_object
from moe_jax.files.tokenizer_files import GENERATION
from moe_jax.models import ModelConfig

_QUESTION, _ANSWER = ({"role": role, "content": f"said by the {role}"} for role in ("user", "assistant"))


def end_tokens(
    config: ModelConfig,
    files: Sequence[Path],
    lineage: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer | None,
    *,
    chat: bool = False,
) -> tuple[int, ...]:
    """Returns the tokens that end a text: those of the config, and of the files beside the weights.

    These are `eos_token_id` of generation_config.json, `eos_token` of tokenizer_config.json, and the token with which
    the chat template ends the assistant's turns, if the model was trained here, or a conversation (`chat`) is to be
    continued: a model may come with a template that it was never trained on.

    Args:
      files: that go with the model, its tokenizer's among them.
      lineage: of the model.
      tokenizer: of the model; None: it has none, and only numbers of tokens are read.

    Raises:
      InputError: if generation_config.json names what is no token of the vocabulary, or a file is no JSON.
    """
    found = [*config.eos_ids, *_of_generation(config, files)]
    if tokenizer is not None:
        named = special_tokens(read_settings(tokenizer.path.with_name("tokenizer_config.json"))).get("eos_token")
        ends = [None if named is None else tokenizer.id_of(named)]
        if chat or any(entry.get("command") == "train" for entry in lineage):
            ends.append(tokenizer.first_special(_behind_turn(tokenizer.path)))
        found += [token for token in ends if token is not None and token < config.vocab_size]
    return tuple(dict.fromkeys(found))


def generation_settings(config: ModelConfig, files: Sequence[Path], ends: Sequence[int]) -> dict[str, Any] | None:
    """Returns the content of a generation_config.json that names all tokens that end a text; None: one is not needed.

    It is needed where the file among `files` does not name them all, or there is none: Transformers reads nothing else.
    """
    file = next((file for file in files if file.name == GENERATION), None)
    if set(ends) <= set(_of_generation(config, files)):
        return None
    known = {"bos_token_id": config.bos_id, "decoder_start_token_id": config.decoder_start_id}
    own = {name: token for name, token in known.items() if token is not None}
    kept = own if file is None else read_json_object(file, allow=ANYTHING)
    return kept | {"eos_token_id": list(ends)}


def _of_generation(config: ModelConfig, files: Sequence[Path]) -> list[int]:
    file = next((file for file in files if file.name == GENERATION), None)
    if file is None:
        return []
    eos = read_json_object(file, allow=ANYTHING).get("eos_token_id")
    found: list[Any] = eos if isinstance(eos, list) else [] if eos is None else [eos]
    for token in found:
        if type(token) is not int or not 0 <= token < config.vocab_size:
            raise InputError(f"{file}: eos_token_id {shown(token)} is no token of the vocabulary; mend or remove it")
    return found


def _behind_turn(tokenizer: Path) -> str:
    """Returns what a chat template writes behind the assistant's words; nothing where there is none that writes them.

    A template that is none is an error where a conversation is written, and not where a text is.
    """
    try:
        template = find_chat_template(tokenizer)
        return "" if template is None else template([_QUESTION, _ANSWER]).rpartition(_ANSWER["content"])[2].lstrip()
    except InputError:
        return ""
