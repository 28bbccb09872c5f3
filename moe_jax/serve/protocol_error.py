"""The error that a request is answered with."""

from typing import Any

from moe_jax.core.errors import clipped


class ProtocolError(Exception):
    """A request that is answered with an error: status of HTTP, message for people, the field at fault, a code."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        kind = {404: "not_found_error", 429: "rate_limit_error"}.get(self.status, "invalid_request_error")
        kind = "server_error" if self.status >= 500 else kind
        # A name that a client made up may be long, and hold halves of characters, which no answer can.
        param = self.param and clipped(self.param.encode("utf-8", "backslashreplace").decode())
        return {"error": {"message": self.message, "type": kind, "param": param, "code": self.code}}
