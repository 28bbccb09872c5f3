"""The error that a request is answered with."""

from typing import Any


class ProtocolError(Exception):
    """A request that is answered with an error: status of HTTP, message for people, the field at fault, a code."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        kind = {404: "not_found_error", 429: "rate_limit_error"}.get(self.status, "invalid_request_error")
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
