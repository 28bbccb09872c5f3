"""A model that is served, and its scheduler."""

import contextlib
import threading

CONTEXT = 300


def client_of(address: str, **options):
    """OpenAI's own client, which takes long to import."""
    import openai

    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60, **options)


@contextlib.contextmanager
def serving(model, scheduler, pictures=None):
    """The address of a server in a thread; requests may name what a folder of pictures holds."""
    import uvicorn

    from moe_jax.commands.serve import _address, _listening
    from moe_jax.serve.app import App
    from moe_jax.serve.connections import server_config

    with _listening("127.0.0.1", 0) as listener:
        app = App(model, model.tokenizer, scheduler, "tiny", pictures=pictures)
        config = server_config(app, requests=scheduler.most, log_level="error", timeout_graceful_shutdown=5)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield _address(listener)
        finally:
            server.should_exit = True
            thread.join(30)
            scheduler.close()
            assert not thread.is_alive()
