"""`moe-jax serve MODEL`: answers requests of the OpenAI protocol."""

import contextlib
import dataclasses
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from moe_jax.commands.options import OneModel
from moe_jax.core.errors import InputError, check_number
from moe_jax.core.interruptions import leave_at_once
from moe_jax.serve.access import Access, is_local

if TYPE_CHECKING:
    from moe_jax.serve.scheduler import Scheduler

API_KEY = "MOE_JAX_API_KEY"
_SECONDS_OF_COMPILER = 1.0  # after answers have ended


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(OneModel):
    """Serves a model by the OpenAI protocol: /v1/completions and /v1/chat/completions, with streaming.

    Requests are answered together: one that comes takes a free slot, and gets tokens with all others. No answer depends
    on the others, but for the last digits of log-probabilities. Whoever can reach the address can use the model,
    unless there is an API key, in MOE_JAX_API_KEY or --api-key.
    """

    host: Annotated[str, tyro.conf.arg(metavar="ADDRESS")] = "127.0.0.1"
    """Address to listen at; 0.0.0.0: all of this machine's."""
    port: int = 8000
    """Port to listen at; 0: any that is free."""
    api_key: Annotated[
        str | None, tyro.conf.arg(metavar="KEY", help_behavior_hint="(default: MOE_JAX_API_KEY, or no key)")
    ] = None
    """Key that requests have to bring, as OpenAI's do. Who lists processes reads it; the environment is kept better."""
    name: Annotated[
        str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: that of the directory)")
    ] = None
    """What the model is called in requests."""
    seats: int = 8
    """Requests that are answered at the same time. Each costs memory for its context."""
    waiting: int = 64
    """Requests that may wait for a slot; one more is refused with status 429."""
    context: Annotated[
        int | None, tyro.conf.arg(metavar="TOKENS", help_behavior_hint="(default: what the model was trained for)")
    ] = None
    """Tokens of a prompt and its answer together, at most."""
    allow_image_folder: Annotated[
        Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: requests hold their pictures)")
    ] = None
    """Of a model that sees: a folder whose pictures requests may name. Nothing is ever fetched."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the activations."""

    def check(self) -> None:
        """Raises `InputError` for numbers that are out of range."""
        if not 0 <= self.port < 1 << 16:
            raise InputError(f"port={self.port} must lie from 0 to 65535")
        check_number(self, "seats", "waiting", at_least=1)
        check_number(self, "context", at_least=2)
        Access(_api_key(self))


EXAMPLES = """
moe-jax serve SmolLM2-135M-Instruct --port 8123 --name smol --context 2048
curl http://127.0.0.1:8123/v1/completions -d '{"model": "smol", "prompt": "Once", "max_tokens": 16}'
"""


def _api_key(options: Options) -> str | None:
    return os.environ.get(API_KEY) or None if options.api_key is None else options.api_key


def run(options: Options) -> None:
    """Serves until it is interrupted; requests that are being answered then have ten seconds to end."""
    try:
        import starlette as starlette
        import uvicorn as uvicorn
    except ImportError as error:
        raise InputError(f"serving needs the package {error.name}: pip install 'moe-jax[serve]'") from None
    from moe_jax.api.measure import tokenizer_of
    from moe_jax.api.model import Loading, Model
    from moe_jax.commands.memory_of_compiling import return_memory_of_compiling
    from moe_jax.images.picture_files import PictureFolder
    from moe_jax.serve.app import App
    from moe_jax.serve.connections import Server, server_config
    from moe_jax.serve.scheduler import Scheduler

    return_memory_of_compiling()
    source = options.open()
    loading = Loading.for_generation(source, compute_dtype=options.compute_dtype, rows=options.seats)
    model = Model.of_source(source, loading)
    tokenizer = tokenizer_of(model, "serving", "serve a model that has one")
    if (options.context or 0) > model.config.max_positions:
        print(
            f"warning: {options.model} was made for {model.config.max_positions} positions, not {options.context}",
            file=sys.stderr,
        )
    pictures = None
    if options.allow_image_folder is not None:
        model.config.check_sees("--allow-image-folder")
        pictures = PictureFolder(options.allow_image_folder)
    with _listening(options.host, options.port) as listener:
        scheduler = Scheduler(model.decoder, slots=options.seats, waiting=options.waiting, context=options.context)
        try:
            print("moe-jax: compiling", file=sys.stderr)
            scheduler.warm()
            scheduler.on_compile = _say_compiling
            name = options.name or options.model.resolve().name
            access = Access(_api_key(options), is_local(listener.getsockname()[0]))
            _warn_if_open(access)
            app = App(model, tokenizer, scheduler, name, access, pictures)
            config = server_config(app, requests=scheduler.most, log_level="warning", access_log=False)
            server = Server(config, scheduler.stop, say=_say)
            seats = f"{options.seats} seats of {scheduler.context} tokens"
            print(f"serving {name!r} at {_address(listener)}/v1 with {seats}", flush=True)
            try:
                server.run(sockets=[listener])
            except KeyboardInterrupt:  # the signal that ended it, which uvicorn raises again when all is done
                if not server.should_exit:
                    raise
        except BaseException:
            scheduler.close(_SECONDS_OF_COMPILER)
            raise
    _end(scheduler)


def _end(scheduler: "Scheduler") -> None:
    """Ends the program, also while a program of XLA is compiled, which nothing interrupts and Python waits for."""
    ended = scheduler.close(_SECONDS_OF_COMPILER)
    _say("stopped")
    if not ended:
        leave_at_once(0)


def _warn_if_open(access: Access) -> None:
    if not access.local_only and access.api_key is None:
        print(f"warning: whoever reaches this machine can use the model; {API_KEY} sets a key", file=sys.stderr)


def _say_compiling(width: int, length: int) -> None:
    _say(f"compiling for {width} at once, of up to {length} tokens")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # perhaps nobody reads it any more; requests are answered all the same
        print(f"moe-jax: {text}", file=sys.stderr, flush=True)


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=256)


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
