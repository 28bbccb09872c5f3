"""A model of this library as lm-eval calls it: log-likelihoods, rolling ones, and texts until a stop string.

Tokens are made and counted as by lm-eval's own backend for Transformers (`hf`), so that figures can be compared.

All of several processes make the same calls. If each has the model on its own devices, it answers its share of the
requests, and all get all answers; if they hold the model together, they answer together.
"""

import hashlib
import json
import os.path
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
from jax.sharding import Mesh
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from moe_jax.core.bad_documents import BadDocument, naming
from moe_jax.core.errors import InputError, nearest, shown
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.data.chat_template import (
    ChatTemplate,
    find_chat_template,
    load_chat_template,
    read_settings,
    special_tokens,
)
from moe_jax.data.end_tokens import end_tokens
from moe_jax.data.pictures.picture_messages import conversation_text, has_pictures, places_of
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.distributed.processes import check_equal, first_decides, gathered, is_first_process
from moe_jax.files.tokenizer_files import GENERATION, TOKENIZER_CONFIG
from moe_jax.generation.spec import GenerateSpec
from moe_jax.generation.texts import StreamedText, stream_texts
from moe_jax.harness.answer_cache import Answer, AnswerCache
from moe_jax.harness.likelihood import Continuation, Likelihoods
from moe_jax.harness.pictures.picture_prompts import PicturePrompts, Prompt, is_about_pictures
from moe_jax.harness.pictures.task_pictures import TaskPictures
from moe_jax.nn import Decoder, unstacked

# Batches of each process between two times that the answers of all are gathered and stored.
_BATCHES = 64

# As many as lm-eval's other backends add if a task says nothing.
MAX_NEW_TOKENS = 256
_LENGTH_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_KEYS = ("until", "do_sample", "temperature", "top_k", "top_p", *_LENGTH_KEYS)


class HarnessModel(TemplateLM):
    """The model that lm-eval evaluates.

    Args:
      max_length: most tokens of an input; the beginning of longer ones is left out. Default: the model's context
        length.
      batch_size: rows computed at once. Does not change a result.
      mesh: the mesh that the model is on, with devices of this process alone or of all; None: its first device.
      cache: stores answers and finds stored ones, in the first of several processes; None: there is none.
      pictures: where those of a task come from, by its name.

    Raises:
      InputError: if the model has an encoder or a head for classes, or names neither BOS nor EOS.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        *,
        max_length: int | None = None,
        batch_size: int = 32,
        mesh: Mesh | None = None,
        cache: AnswerCache | None = None,
        pictures: Mapping[str, TaskPictures] | None = None,
        progress: Progress = no_progress,
    ):
        super().__init__()
        self.max_length = model.config.max_positions if max_length is None else max_length
        self.batch_size = batch_size
        self._model, self._tokens, self._progress, self._cache = model, tokenizer, progress, cache
        devices = [] if mesh is None else list(mesh.devices.flat)
        own = all(device.process_index == jax.process_index() for device in devices)
        self._parts = jax.process_count() if own else 1
        self._has_cache = first_decides(lambda: cache is not None)
        self._likelihoods = Likelihoods(model, max_length=self.max_length, batch_size=batch_size, mesh=mesh)
        self._unstacked: Decoder | None = None
        self._key = jax.random.key(0)
        self._template: ChatTemplate | None = None
        self._pictures = PicturePrompts(model.config, tokenizer, pictures or {})
        bos, eos = _special_ids(tokenizer, model.config.bos_id, model.config.eos_ids)
        if bos is None and eos is None:
            raise InputError("the model names neither BOS nor EOS, one of which stands before a text without a context")
        self._prefix, self._bos = (eos if bos is None else bos), bos
        self._eos_ids = tuple(dict.fromkeys((*model.config.eos_ids, *(() if eos is None else (eos,)))))

    # So that lm-eval gives it tasks with pictures.
    MULTIMODAL = True

    @property
    def eot_token_id(self) -> int:
        """The first token that ends a text; without one, the token that begins a text."""
        return self._eos_ids[0] if self._eos_ids else self.prefix_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context."""
        assert self._prefix is not None
        return self._prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Returns token ids; after BOS if the tokenizer adds one, unless the text has it already or it is unwanted."""
        plain = add_special_tokens is False or (add_special_tokens is None and self._has_bos(string))
        return (self._tokens.encode(string) if plain else self._tokens.prompt(string)).tolist()

    def _has_bos(self, text: str) -> bool:
        return self._bos is not None and text.startswith(self._tokens.token(self._bos))

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Returns for each continuation of a context its log-likelihood, and whether it is the greedy one."""
        del disable_tqdm
        return self._answered("loglikelihood", requests, self._likelihoods_of)

    def _likelihoods_of(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        rows = []
        for request in requests:
            with naming(f"{request.task_name}, document {request.doc_id} (from 0)"):
                rows.append((request.args, *self._scorable(*cast(tuple[str, str], request.args))))
        return self._loglikelihood_tokens(rows)

    def check_request(self, request: Instance) -> None:
        """Raises `BadDocument` for a likelihood that there is none of, and for pictures that cannot be seen."""
        if request.request_type == "loglikelihood":
            self._scorable(*cast(tuple[str, str], request.args))
        elif request.request_type == "generate_until":
            self._pictures.check(request)
            self._prompt(request, _settings(_generation_options(request)))

    def _scorable(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        before, after = self._in_tokens(context, continuation)
        if not after:
            raise BadDocument(f"the answer {shown(continuation)} has no tokens, so that nothing is scored")
        if len(after) > self.max_length:
            raise BadDocument(f"an answer of {len(after):,} tokens is more than the {self.max_length:,} that fit")
        return before, after

    def _in_tokens(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Returns the tokens of a context, at least one, and those of its continuation, as lm-eval divides them.

        If a token spans both, and lm-eval would find no tokens of the continuation, it belongs to that.
        """
        if not context:
            ids = self.tok_encode(continuation, add_special_tokens=False)
            return (ids[:1], ids[1:]) if ids[:1] == [self.prefix_token_id] else ([self.prefix_token_id], ids)
        before, after = self._encode_pair(context, continuation)
        if not after and continuation:
            whole = self.tok_encode(context + continuation)
            shared = len(os.path.commonprefix([whole, before]))
            before, after = whole[:shared], whole[shared:]
        return before or [self.prefix_token_id], after

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Does so for texts (None for a window of a longer one), tokens of contexts, and tokens of continuations."""
        del disable_tqdm
        asked = [Continuation(context, tokens) for _, context, tokens in requests]

        def keep(index: int, answer: Answer) -> None:
            if requests[index][0] is not None:
                self._keep("loglikelihood", requests[index][0], answer)

        found = self._likelihoods(asked, self._progress, keep)
        return [(one.log_likelihood, one.is_greedy) for one in found]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Returns the log-likelihoods of whole texts, in windows of `max_length` tokens, every token scored once."""
        del disable_tqdm
        return self._answered("loglikelihood_rolling", requests, self._rolling)

    def _rolling(self, requests: list[Instance]) -> list[float]:
        windows, owners = [], []
        for index, request in enumerate(requests):
            (text,) = request.args
            rolling = get_rolling_token_windows(
                self.tok_encode(text), prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            for window in rolling:
                windows.append((None, *make_disjoint_window(window)))
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += value
        for request, total in zip(requests, totals, strict=True):
            self._keep("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Returns texts that end before a stop string, greedy unless a task says otherwise."""
        del disable_tqdm
        return self._answered("generate_until", requests, self._generate)

    def _generate(self, requests: list[Instance]) -> list[str]:
        if self._unstacked is None:
            self._unstacked = unstacked(self._model)
        settings = [_settings(_generation_options(request)) for request in requests]
        prompts = []
        for request, wanted in zip(requests, settings, strict=True):
            with naming(self._pictures.name_of(request)):
                prompts.append(self._prompt(request, wanted))
        groups: dict[GenerateSpec, list[int]] = {}
        for index in sorted(range(len(requests)), key=lambda index: -len(prompts[index].ids)):
            groups.setdefault(settings[index], []).append(index)
        texts: dict[int, str] = {}
        # As `moe-jax generate`, which knows besides whether the model was trained here.
        files = [file for file in (self._tokens.path.with_name(GENERATION),) if file.is_file()]
        chat = self._template is not None
        ends = end_tokens(self._model.config, files, (), self._tokens, chat=chat)
        eos_ids = tuple(dict.fromkeys((*self._eos_ids, *ends)))
        self._progress("generating", 0, len(requests))
        for wanted, indices in groups.items():
            for start in range(0, len(indices), self.batch_size):
                chunk = indices[start : start + self.batch_size]
                self._key, key = jax.random.split(self._key)
                ids = [prompts[index].ids for index in chunk]
                slots = [prompts[index].slots for index in chunk]
                pictures = self._pictures.seen([requests[index] for index in chunk], slots)
                made = [StreamedText(self._tokens.decode, wanted.stops, eos_ids=eos_ids) for _ in ids]
                for _ in stream_texts(self._unstacked, ids, wanted, made, key=key, eos_ids=eos_ids, pictures=pictures):
                    pass
                for index, one in zip(chunk, made, strict=True):
                    texts[index] = one.text
                    self._keep("generate_until", self._pictures.key_of(requests[index]), one.text)
                self._progress("generating", len(texts), len(requests))
        return [texts[index] for index in range(len(requests))]

    def _prompt(self, request: Instance, wanted: GenerateSpec) -> Prompt:
        """Returns the tokens of a request for a text, without the beginning of one that does not fit."""
        room = self.max_length - wanted.max_new_tokens
        if room < 1:
            raise InputError(f"{wanted.max_new_tokens:,} tokens to generate do not fit into {self.max_length:,}")
        if not is_about_pictures(request):
            ids = self.tok_encode(request.args[0])[-room:] or [self.prefix_token_id]
            return Prompt(ids, [0] * len(ids))
        prompt = self._pictures.prompt(request, begins=not self._has_bos(request.args[0]))
        if len(prompt.ids) > room:
            raise BadDocument(
                f"its prompt of {len(prompt.ids):,} tokens, its pictures included, does not fit into {room:,}, which "
                f"{wanted.max_new_tokens:,} tokens of an answer leave"
            )
        return prompt

    def _answered(self, kind: str, requests: list[Instance], make: Callable[[list[Instance]], list[Any]]) -> list[Any]:
        """Returns the stored answers, and new ones to the other requests."""
        if jax.process_count() > 1:
            asked = json.dumps([request.args for request in requests], default=str).encode()
            check_equal({"what the tasks ask": hashlib.sha256(asked).hexdigest()})
        found: list[Any] = [None] * len(requests)
        if self._has_cache:
            kept = first_decides(lambda: [self._kept(kind, request) for request in requests])
            found = [tuple(answer) if isinstance(answer, list) else answer for answer in kept]
        missing = [index for index, answer in enumerate(found) if answer is None]
        if missing:
            made = self._shared(kind, [requests[index] for index in missing], make)
            for index, answer in zip(missing, made, strict=True):
                found[index] = answer
        return found

    def _kept(self, kind: str, request: Instance) -> Answer | None:
        assert self._cache is not None
        return None if _is_random(kind, request) else self._cache.find(kind, self._pictures.key_of(request))

    def _shared(self, kind: str, requests: list[Instance], make: Callable[[list[Instance]], list[Any]]) -> list[Any]:
        """Returns answers that all processes make together.

        Each makes its own share; but all make all answers that are drawn, which would differ with the number of
        processes.
        """
        if self._parts == 1 or any(_is_random(kind, request) for request in requests):
            return make(requests)
        made: list[Any] = []
        size = self._parts * self.batch_size * _BATCHES if self._has_cache else len(requests)
        for start in range(0, len(requests), size):
            asked = requests[start : start + size]
            own = asked[jax.process_index() :: self._parts]
            answers: list[Any] = [None] * len(asked)
            for part, found in enumerate(gathered(make(own) if own else [])):
                answers[part :: self._parts] = [tuple(one) if isinstance(one, list) else one for one in found]
                if is_first_process() and part:
                    for request, answer in zip(asked[part :: self._parts], found, strict=True):
                        self._keep(kind, self._pictures.key_of(request), answer)
            made += answers
        return made

    def _keep(self, kind: str, request: Sequence[Any], answer: Answer) -> None:
        if self._cache is not None:
            self._cache.keep(kind, request, answer)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns a conversation as the model's text; one to be continued ends with the assistant's own words.

        Messages of a model that sees may show pictures, at `<image>`.
        """
        if self._template is None:
            self._template = load_chat_template(self._tokens.path)
        how: Any = {"add_generation_prompt": add_generation_prompt}
        if self._model.config.vision is not None and self._template.takes_parts and has_pictures(chat_history):
            text = conversation_text(chat_history, places_of(chat_history), self._template, **how)
        else:
            text = self._template(chat_history, **how)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        begin = text.rfind(last)
        if begin < 0:
            raise InputError(f"the chat template does not write {shown(last[:40])}, which the answer begins with")
        return text[: begin + len(last)]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the template's source; None if there is none or none is wanted."""
        found = find_chat_template(self._tokens.path) if chat_template else None
        return None if found is None else found.source

    @property
    def tokenizer_name(self) -> str:
        """A name that identifies the tokenizer in lm-eval's cache of requests."""
        return hash_of_tokenizer(self._tokens)


def _generation_options(request: Instance) -> dict[str, Any]:
    """Returns the `generation_kwargs` of a request for a text."""
    return cast(tuple[Any, ...], request.args)[1]


def _is_random(kind: str, request: Instance) -> bool:
    return kind == "generate_until" and _settings(_generation_options(request)).temperature > 0


def _settings(given: Mapping[str, Any]) -> GenerateSpec:
    """Converts a task's settings for texts to options of `generate`."""
    for name in given:
        if name not in _KEYS:
            raise InputError(f"generation_kwargs: {name!r} is not known{nearest(name, _KEYS)}: {', '.join(_KEYS)}")
    until = given.get("until") or []
    lengths = [given[name] for name in _LENGTH_KEYS if given.get(name) is not None]
    temperature = float(given.get("temperature") or 0.0)
    if given.get("do_sample") is False:
        temperature = 0.0
    elif given.get("do_sample") and not temperature:
        temperature = 1.0
    sampling: dict[str, Any] = {"top_k": given.get("top_k"), "top_p": given.get("top_p")} if temperature else {}
    most = int(lengths[0]) if lengths else MAX_NEW_TOKENS
    stop = tuple(one for one in ([until] if isinstance(until, str) else until) if one)
    return GenerateSpec(stop=stop, max_new_tokens=most, temperature=temperature, **sampling)


def hash_of_tokenizer(tokenizer: Tokenizer) -> str:
    """Returns a SHA-256 of a tokenizer, and of the files beside it that say how texts begin and end."""
    files = (tokenizer.path, *(tokenizer.path.with_name(name) for name in (TOKENIZER_CONFIG, GENERATION)))
    hashes = (hashlib.sha256(file.read_bytes() if file.is_file() else b"").digest() for file in files)
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def _special_ids(tokenizer: Tokenizer, bos: int | None, eos: Sequence[int]) -> tuple[int | None, int | None]:
    """Returns BOS and EOS: from tokenizer_config.json, as `hf` takes them, or else from the model."""
    settings = read_settings(tokenizer.path.with_name(TOKENIZER_CONFIG))
    named = {name: tokenizer.id_of(token) for name, token in special_tokens(settings).items()}
    of_model = {"bos_token": bos, "eos_token": eos[0] if eos else None}
    found = {name: named.get(name) if name in settings else given for name, given in of_model.items()}
    return found["bos_token"], found["eos_token"]
