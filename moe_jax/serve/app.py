"""The HTTP side of the server: OpenAI's paths, JSON and server-sent events."""

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from moe_jax.api.generate import eos_ids
from moe_jax.api.model import Model
from moe_jax.core.errors import InputError
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.files.json_toml import ANYTHING, parse_json
from moe_jax.generation.continued_rows import MOST_STOP_IDS
from moe_jax.images.picture_files import PictureFolder
from moe_jax.serve.access import Access
from moe_jax.serve.answers import Answer, Piece, TokenTexts
from moe_jax.serve.asked_pictures import PictureReader
from moe_jax.serve.lanes import Lane
from moe_jax.serve.openai import MOST_VALUES, model_of, read_chat, read_completion
from moe_jax.serve.openai import Request as Asked
from moe_jax.serve.prompts import Prompt, PromptReader
from moe_jax.serve.protocol_error import ProtocolError
from moe_jax.serve.scheduler import Closed, Full, Scheduler

MOST_BYTES = 16 << 20
"""Largest body of a request."""
MOST_BYTES_WITH_PICTURES = 64 << 20
"""Largest body of a request to a model that sees."""
_SECONDS_TO_RETRY = 1
_SECONDS_OF_BODY = 60.0
_SHORT = 1 << 16  # bytes of a request that is read in no time

T = TypeVar("T")


class App(Starlette):
    """The application of the server of one model, called `name`; whoever started its scheduler closes it.

    Requests to a model that sees may name pictures in the folder of `pictures`; None: they hold all of theirs.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        name: str,
        access: Access | None = None,
        pictures: PictureFolder | None = None,
    ):
        self._access = access or Access()
        self._model, self._tokenizer, self._scheduler, self._name = model, tokenizer, scheduler, name
        self._texts = TokenTexts(tokenizer)
        self._sees = model.config.vision is not None
        self._prompts = PromptReader(
            tokenizer,
            vocab_size=model.config.vocab_size,
            context=scheduler.context,
            sees=PictureReader(model.config, pictures) if self._sees else None,
        )
        # A long request is read beside short ones.
        self._short, self._long, self._reading = Lane(), Lane(), 0
        self._eos, self._chat_eos = eos_ids(model), eos_ids(model, chat=True)
        if (ends := len({*self._eos, *self._chat_eos})) > MOST_STOP_IDS:
            raise InputError(f"the model names {ends} tokens that end a text; at most {MOST_STOP_IDS} can be served")
        self._created = int(time.time())
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._one_model),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        handlers = {ProtocolError: _error, HTTPException: _http_error, Exception: _bug}
        super().__init__(routes=routes, exception_handlers=handlers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers requests of those who have access, as ASGI has it."""
        if scope["type"] == "http":
            try:
                self._access.check(scope["path"], Headers(scope=scope))
            except ProtocolError as error:
                await _response(error)(scope, receive, send)
                return
        # Who is cancelled is not listening, or not speaking, when the server ends: that is no bug to be traced.
        with contextlib.suppress(asyncio.CancelledError):
            await super().__call__(scope, receive, send)

    async def _health(self, request: Request) -> Response:
        failure = self._scheduler.failure
        if failure is not None:
            return JSONResponse({"status": "failed", "problem": failure}, 503)
        return JSONResponse({"status": "ok", **self._scheduler.load()})

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _one_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        limits = {"max_model_len": self._scheduler.context}
        return {"id": self._name, "object": "model", "created": self._created, "owned_by": "moe-jax", **limits}

    def _check_model(self, name: str) -> None:
        if name != self._name:
            raise ProtocolError(
                404, f"the model {name!r} does not exist; this server has {self._name!r}", code="model_not_found"
            )

    async def _completions(self, http: Request) -> Response:
        asked, answers = await self._read(http, self._read_completion)
        head = self._head("cmpl", "text_completion")

        def choice(index: int, piece: Piece) -> dict[str, Any]:
            logprobs = None
            if asked.logprobs is not None:
                logprobs = self._texts.completion_logprobs(piece.told, asked.logprobs)
            return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}

        if asked.stream:
            return self._streamed(asked, answers, head, choice, [])
        pieces = await _collected(http, answers)
        choices = [choice(index, piece) for index, piece in enumerate(pieces)]
        return JSONResponse({**head, "choices": choices, "usage": _usage(answers)})

    async def _chat(self, http: Request) -> Response:
        asked, answers = await self._read(http, self._read_chat)
        head = self._head("chatcmpl", "chat.completion.chunk" if asked.stream else "chat.completion")

        def rest(piece: Piece) -> dict[str, Any]:
            told = None if asked.logprobs is None else self._texts.chat_logprobs(piece.told, asked.logprobs)
            return {"logprobs": told, "finish_reason": piece.finish}

        def delta(index: int, piece: Piece) -> dict[str, Any]:
            return {"index": index, "delta": {"content": piece.text}, **rest(piece)}

        if asked.stream:
            opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            return self._streamed(asked, answers, head, delta, [opening])
        (piece,) = await _collected(http, answers)
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        choice = {"index": 0, "message": message, **rest(piece)}
        return JSONResponse({**head, "choices": [choice], "usage": _usage(answers)})

    async def _read(
        self, http: Request, read: Callable[[Any], tuple[Asked, list[Prompt]]]
    ) -> tuple[Asked, list[Answer]]:
        """Returns a request, and the answers to its prompts, which the scheduler has.

        Raises `ProtocolError` for a request that is not right, or that finds no place.
        """
        content = await _content(http, MOST_BYTES_WITH_PICTURES if self._sees else MOST_BYTES)
        if self._reading >= self._scheduler.most:
            raise _full()

        def prompts() -> tuple[Asked, list[Prompt]]:
            try:
                body = parse_json(content, where="the request", allow=ANYTHING, max_values=MOST_VALUES)
            except InputError as error:
                raise ProtocolError(400, str(error)) from None
            self._check_model(model_of(body))
            return read(body)

        self._reading += 1
        try:
            lane = self._short if len(content) <= _SHORT else self._long
            asked, found = await _unless_gone(http, lane.run(prompts))
        finally:
            self._reading -= 1
        return asked, self._submit(asked, found)

    def _read_completion(self, body: Any) -> tuple[Asked, list[Prompt]]:
        asked = read_completion(body)
        if len(asked.prompts) > self._scheduler.most:
            raise ProtocolError(
                400,
                f"{len(asked.prompts)} prompts in a request, but {self._scheduler.most} are answered or wait at most",
                param="prompt",
            )
        return asked, [self._prompts.of(prompt, echo=asked.echo) for prompt in asked.prompts]

    def _read_chat(self, body: Any) -> tuple[Asked, list[Prompt]]:
        asked = read_chat(body, sees=self._sees)
        return asked, [self._prompts.of_conversation(asked.messages, asked.pictures)]

    def _head(self, prefix: str, kind: str) -> dict[str, Any]:
        name = f"{prefix}-{secrets.token_hex(12)}"
        return {"id": name, "object": kind, "created": int(time.time()), "model": self._name}

    def _submit(self, asked: Asked, prompts: Sequence[Prompt]) -> list[Answer]:
        context = self._scheduler.context
        longest = max(len(prompt.ids) for prompt in prompts)
        wanted = 1 if asked.max_tokens is None else asked.max_tokens
        if longest + wanted > context:
            raise ProtocolError(
                400,
                f"this model's maximum context length is {context} tokens; the prompt has {longest} and {wanted} are "
                "to be added",
                param="prompt" if asked.prompts else "messages",
                code="context_length_exceeded",
            )
        if not wanted and not asked.echo:
            raise ProtocolError(400, "max_tokens=0 goes with echo", param="max_tokens")
        eos = self._chat_eos if asked.messages else self._eos
        stop_ids = tuple(dict.fromkeys((*(() if asked.ignore_eos else eos), *asked.stop_ids)))
        if len(stop_ids) > MOST_STOP_IDS:
            problem = f"{len(stop_ids)} tokens end the text, with the model's own; at most {MOST_STOP_IDS} are taken"
            raise ProtocolError(400, problem, param="stop_token_ids")
        answers = [
            Answer(
                asked,
                prompt,
                context - len(prompt.ids) if asked.max_tokens is None else wanted,
                stop_ids,
                self._tokenizer,
            )
            for prompt in prompts
        ]
        try:
            self._scheduler.submit([answer.job for answer in answers])
        except Full:
            raise _full() from None
        except Closed as error:
            raise ProtocolError(503, str(error)) from None
        return answers

    def _streamed(
        self,
        asked: Asked,
        answers: Sequence[Answer],
        head: dict[str, Any],
        choice: Callable[[int, Piece], dict[str, Any]],
        opening: Sequence[dict[str, Any]],
    ) -> Response:
        async def events() -> AsyncIterator[str]:
            try:
                for one in opening:
                    yield _event({**head, "choices": [one]})
                async for index, piece in _merged(answers):
                    yield _event({**head, "choices": [choice(index, piece)]})
                if asked.include_usage:
                    yield _event({**head, "choices": [], "usage": _usage(answers)})
            except ProtocolError as error:
                yield _event(error.body())
            except Exception as error:
                yield _event(_failed(error).body())
                raise  # so that it is logged
            yield "data: [DONE]\n\n"  # clients wait for it, whatever came before

        return _Stream(answers, events())


class _Stream(StreamingResponse):
    """Events of answers that are cancelled when it ends, also if the client went away before the first."""

    def __init__(self, answers: Sequence[Answer], events: AsyncIterator[str]):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for answer in self._answers:
                answer.cancel()


async def _merged(answers: Sequence[Answer]) -> AsyncIterator[tuple[int, Piece]]:
    """The pieces of all answers as they come."""
    queue: asyncio.Queue[tuple[int, Piece] | BaseException | None] = asyncio.Queue()

    async def forward(index: int, answer: Answer) -> None:
        try:
            async for piece in answer.pieces():
                queue.put_nowait((index, piece))
            queue.put_nowait(None)
        except Exception as error:  # whatever it is: somebody waits for the queue
            queue.put_nowait(error)

    tasks = [asyncio.create_task(forward(index, answer)) for index, answer in enumerate(answers)]
    try:
        left = len(tasks)
        while left:
            found = await queue.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()


async def _collected(http: Request, answers: Sequence[Answer]) -> list[Piece]:
    """All answers, whole; if the client goes away, they are cancelled."""

    async def collect() -> list[Piece]:
        found = [Piece("", [], None) for _ in answers]
        async for index, piece in _merged(answers):
            before = found[index]
            found[index] = Piece(before.text + piece.text, before.told + piece.told, piece.finish)
        return found

    try:
        return await _unless_gone(http, collect())
    finally:
        for answer in answers:
            answer.cancel()


async def _content(http: Request, most: int) -> bytes:
    """The body of a request; raises `ProtocolError` if it has more than so many bytes, or does not come."""
    content = bytearray()
    try:
        async with asyncio.timeout(_SECONDS_OF_BODY):
            async for chunk in http.stream():
                content += chunk
                if len(content) > most:
                    raise ProtocolError(413, f"a request may have {most:,} bytes")
    except ClientDisconnect:
        raise _gone() from None
    except TimeoutError:
        raise ProtocolError(408, f"the request did not come within {_SECONDS_OF_BODY:g} seconds") from None
    return bytes(content)


async def _unless_gone(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work; if the client goes away, it is cancelled, and an error says so that nobody will read."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _gone()
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    before, made = sum(len(answer.job.ids) for answer in answers), sum(answer.made for answer in answers)
    return {"prompt_tokens": before, "completion_tokens": made, "total_tokens": before + made}


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _full() -> ProtocolError:
    return ProtocolError(429, "too many requests wait; try again later", code="queue_full")


def _gone() -> ProtocolError:
    return ProtocolError(499, "the client has gone away")


def _response(error: ProtocolError) -> Response:
    headers = {429: {"Retry-After": str(_SECONDS_TO_RETRY)}, 401: {"WWW-Authenticate": "Bearer"}}
    return JSONResponse(error.body(), error.status, headers.get(error.status))


async def _error(request: Request, error: Any) -> Response:
    return _response(error)


async def _http_error(request: Request, error: Any) -> Response:
    """Paths and methods that there are not."""
    return _response(ProtocolError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))


async def _bug(request: Request, error: Exception) -> Response:
    return _response(_failed(error))


def _failed(error: Exception) -> ProtocolError:
    return ProtocolError(500, f"the server failed: {type(error).__name__}")
