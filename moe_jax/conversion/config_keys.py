"""Reads a Hugging Face config.json key by key, with the type that each key must have."""

from collections.abc import Collection, Mapping
from typing import Any, TypeGuard

from moe_jax.conversion.named_keys import with_keys
from moe_jax.core.errors import MAX_SIZE, InputError, clipped, is_finite, raise_if_any, shown
from moe_jax.files.json_toml import fits_64_bits

# Where a file came from, how it is stored, and how Transformers runs it.
_STORAGE = (
    "architectures", "auto_map", "custom_pipelines", "dtype", "framework", "model_max_length", "model_name",
    "model_type", "name_or_path", "quantization_config", "tokenizer_class", "torch_dtype", "torchscript",
    "transformers_version", "transformers_weights", "transformers.js_config", "use_bfloat16", "use_cache",
    "use_flash_attention", "use_flash_attn", "use_mem_eff_path",
)  # fmt: skip
# Training: initial values, dropout (which our training applies to adapters alone), losses and their outputs.
_TRAINING = (
    "attention_dropout", "attn_pdrop", "embd_pdrop", "ffn_dropout_rate", "gradient_checkpointing", "hidden_dropout",
    "initializer_factor", "initializer_range", "loss_type", "output_router_logits", "resid_pdrop", "resid_dropout",
    "router_jitter_noise", "embedding_dropout", "residual_dropout",
)  # fmt: skip
# Outputs of Transformers, and the same product cut in pieces.
_OUTPUTS = (
    "chunk_size_feed_forward", "output_attentions", "output_hidden_states", "pretraining_tp", "return_dict",
    "return_dict_in_generate", "output_scores", "use_return_dict",
)  # fmt: skip
# Special tokens that no forward pass uses, labels of other tasks.
_TASK = (
    "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "unk_token_id", "bos_token_id", "eos_token_id",
    "decoder_start_token_id", "classifier_dropout", "finetuning_task", "id2label", "label2id", "num_labels",
    "problem_type", "task_specific_params", "prefix", "is_llama_config",
)  # fmt: skip
# Generation: releases of Transformers before 4.25 kept it here.
_GENERATION = (
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "length_penalty", "max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_return_sequences", "remove_invalid_values", "repetition_penalty", "suppress_tokens",
    "temperature", "top_k", "top_p", "typical_p",
)  # fmt: skip
_HARMLESS = frozenset((*_STORAGE, *_TRAINING, *_OUTPUTS, *_TASK, *_GENERATION))
# Notes that Transformers and fine-tuning tools keep for themselves.
_PREFIXES = ("_", "unsloth_")
# Keys that have no effect as long as they have this value.
_UNUSED: dict[str, Any] = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "rope_interleaved": False,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
}


def is_harmless(key: str, value: Any) -> bool:
    """Whether a key with this value has no effect on what a model of any family computes."""
    return key in _HARMLESS or key.startswith(_PREFIXES) or (key in _UNUSED and value == _UNUSED[key])


def code_beside(keys: Mapping[str, Any]) -> list[str]:
    """Returns the names of files with code beside a JSON file, which its key `auto_map` says that a class is in.

    Code in a repository (`repository--module.Class`) is not among them.
    """
    named = keys.get("auto_map")
    entries = named.values() if isinstance(named, Mapping) else [named]
    return sorted({file for entry in entries for file in _files_of(entry)})


def without_code_beside(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keys without what asks for code beside their file, which goes nowhere with a model (`code_beside`)."""
    if not code_beside(keys):
        return dict(keys)
    named, rest = keys["auto_map"], {key: value for key, value in keys.items() if key != "auto_map"}
    named = named if isinstance(named, Mapping) else {}
    elsewhere = {name: entry for name, entry in named.items() if not _files_of(entry)}
    return rest | ({"auto_map": elsewhere} if elsewhere else {})


def _files_of(entry: Any) -> list[str]:
    """Returns the files beside it that an entry of `auto_map` names; those of tokenizers name two classes or one."""
    classes = entry if isinstance(entry, list) else [entry]
    modules = [one.rpartition(".")[0] for one in classes if isinstance(one, str)]
    return [f"{module}.py" for module in modules if module.isidentifier()]


class HFConfig:
    """Reads values from a Hugging Face config and remembers which keys were not read.

    A key that is absent has the default of its family; a key that is `null` is None, as in Transformers
    (`"num_key_value_heads": null` means something else than leaving it out).
    """

    def __init__(self, data: Mapping[str, Any], defaults: Mapping[str, Any], names: Mapping[str, str] = {}):
        """Takes the keys and their defaults; `names` has the names of keys that are called otherwise by the caller."""
        self._data = data
        self._defaults = defaults
        self._names = names
        # In the order in which they were read last.
        self._taken: dict[str, None] = dict.fromkeys(("model_type", "architectures"))
        self._checked: set[str] = set()
        self._kept: dict[str, Any] = {}
        self._unknown_inside: list[str] = []

    def require(self, *keys: str) -> None:
        """Raises one `InputError` naming every key that has neither a value nor a default."""
        keys = tuple(self._names.get(key, key) for key in keys)
        missing = [key for key in keys if self._data.get(key, self._defaults.get(key)) is None]
        raise_if_any([f"it has no {key!r}, which cannot be guessed" for key in missing], "config.json")

    def is_default(self, key: str) -> bool:
        """Whether a key has its family's default, given or not."""
        key = self._names.get(key, key)
        return self._data.get(key, self._defaults.get(key)) == self._defaults.get(key)

    def has_default(self, key: str) -> bool:
        """Whether the family has a default for a key."""
        return self._names.get(key, key) in self._defaults

    def given(self, key: str) -> bool:
        """Whether the config itself holds a value for `key`."""
        return self._data.get(self._names.get(key, key)) is not None

    def must_be(self, key: str, value: Any, *spellings: Any) -> None:
        """Raises `InputError` unless `key` has this value, or is left out and has no other default.

        Other `spellings` say the same.

        The key counts as not read, so that it is written back.
        """
        key = self._names.get(key, key)
        self._checked.add(key)
        found = self._data.get(key, self._defaults.get(key, value))
        if found not in (value, *spellings):
            raise InputError(f"config.json: {key!r} is {shown(found)}, only {shown(value)} is supported")

    def integer(self, key: str) -> int | None:
        """Takes an integer of 64 bits, or None."""
        return self._take(key, "an integer", is_integer)

    def required_integer(self, key: str) -> int:
        """Takes an integer that must be there; raises as `require` does."""
        self.require(key)
        return self._take(key, "an integer", is_integer)

    def required_size(self, key: str) -> int:
        """Takes an integer that must be there and that something can have as its size; raises as `require` does."""
        size = self.required_integer(key)
        if not 1 <= size <= MAX_SIZE:
            raise InputError(f"config.json: {self._names.get(key, key)!r} is {size}, expected 1 to {MAX_SIZE:,}")
        return size

    def number(self, key: str) -> float | None:
        """Takes a number, finite in float32, as a float, or None."""
        value = self._take(key, "a number", is_finite)
        return None if value is None else float(value)

    def required_number(self, key: str) -> float:
        """Takes a number as a float, which must be there; raises as `require` does."""
        self.require(key)
        return float(self._take(key, "a number", is_finite))

    def flag(self, key: str) -> bool:
        """Takes true or false; None counts as false."""
        return bool(self._take(key, "true or false", lambda v: isinstance(v, bool)))

    def text(self, key: str) -> str | None:
        """Takes a string, or None."""
        return self._take(key, "a string", lambda v: isinstance(v, str))

    def mapping(self, key: str) -> dict[str, Any] | None:
        """Takes a JSON object, or None."""
        return self._take(key, "an object", lambda v: isinstance(v, dict))

    def integers(self, key: str, *, lists_only: bool = False) -> tuple[int, ...]:
        """Takes a list of integers or, unless `lists_only`, an integer; None is the empty tuple."""
        value = self._take(
            key,
            "a list of integers" if lists_only else "an integer or a list of integers",
            lambda v: all(map(is_integer, v)) if isinstance(v, list) else not lists_only and is_integer(v),
        )
        return tuple(value) if isinstance(value, list) else () if value is None else (value,)

    def texts(self, key: str) -> tuple[str, ...] | None:
        """Takes a list of strings, or None."""
        value = self._take(key, "a list of strings", lambda v: isinstance(v, list) and {*map(type, v)} <= {str})
        return None if value is None else tuple(value)

    def keep(self, key: str, value: Any) -> None:
        """Writes `value` back under `key` on export, although the key was read."""
        self._kept[self._names.get(key, key)] = value

    def given_among(self, keys: Collection[str]) -> dict[str, Any]:
        """Takes those of the keys that the config holds, as they are."""
        self._taken |= dict.fromkeys(keys)
        return {key: self._data[key] for key in keys if key in self._data}

    def said_of_keys(self, error: InputError) -> InputError:
        """Returns an error of the config that was made of these keys, with their names (`named_keys.with_keys`)."""
        return with_keys(error, {key: self._data.get(key, self._defaults.get(key)) for key in self._taken}, self._data)

    def unread_keys(self) -> dict[str, Any]:
        """Returns the keys that were not read, which are written back unchanged on export."""
        return {key: value for key, value in self._data.items() if key not in self._taken} | self._kept

    def unknown_inside(self, key: str, inner: Collection[str]) -> None:
        """Notes keys of the object under `key` that the reader does not know."""
        self._unknown_inside += [f"{key}.{one}" for one in inner]

    def check_all_known(self, harmless: Collection[str], ignored: Collection[str]) -> None:
        """Raises `InputError` for keys that were neither read nor are known to change nothing. To be called last.

        Keys in `harmless` change nothing in this family; the caller allows those in `ignored`, such as `object.key`.
        """
        read = self._taken.keys() | self._checked | self._defaults.keys() | set(harmless)
        unknown = [key for key, value in self._data.items() if key not in read and not is_harmless(key, value)]
        unknown = [key for key in unknown + self._unknown_inside if key not in ignored]
        if unknown:
            raise InputError(
                f"config.json: {shown(unknown[0])}{f' and {len(unknown) - 1} more keys' if unknown[1:] else ''} may "
                f"change what the model computes, in a way that is not supported; if not, say so with "
                f"moe-jax convert --ignore-keys {clipped(','.join(map(_on_a_line, unknown)))}"
            )

    def _take(self, key: str, expected: str, is_valid: Any) -> Any:
        key = self._names.get(key, key)
        self._taken.pop(key, None)
        self._taken[key] = None
        value = self._data.get(key, self._defaults.get(key))
        if value is not None and not is_valid(value):
            raise InputError(f"config.json: {key!r} is {shown(value)}, expected {expected}")
        return value


def is_integer(value: Any) -> TypeGuard[int]:
    """Whether a JSON value is an integer of 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and fits_64_bits(value)


def _on_a_line(key: str) -> str:
    """Returns the name of a key, with characters that would break a line escaped."""
    return key if key.isprintable() else repr(key)[1:-1]
