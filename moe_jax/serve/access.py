"""Who may ask: those who know the key, and on a server for this machine alone, no page of a strange site."""

import dataclasses
import hmac
import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from moe_jax.core.errors import InputError, shown
from moe_jax.serve.protocol_error import ProtocolError


@dataclasses.dataclass(frozen=True)
class Access:
    """Checks the headers of requests.

    A browser sends what any page asks for. The page of a site whose name was made to lead to this machine (DNS
    rebinding) is told by the name in `Host`, every other one by its `Origin`.

    Attributes:
      api_key: that all requests but those to `/health` have to bring; None: there is none.
      local_only: whether the server listens at this machine only, so that its names alone are right.

    Raises:
      InputError: for a key that no header can hold.
    """

    api_key: str | None = dataclasses.field(default=None, repr=False)
    local_only: bool = True

    def __post_init__(self) -> None:
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise InputError("the API key must be printable ASCII, at least one character")

    def check(self, path: str, headers: Mapping[str, str]) -> None:
        """Raises `ProtocolError`, with status 401 or 403, for a request without access; `headers` are lower-case."""
        if self.local_only:
            for name, prefix in (("host", "//"), ("origin", "")):
                value = headers.get(name)
                if value is not None and not is_local(_host_of(prefix + value)):
                    raise ProtocolError(
                        403, f"the server listens at this machine only, and {name.title()} is {shown(value)}"
                    )
        if self.api_key is not None and path != "/health" and not self._is_known(headers.get("authorization", "")):
            raise ProtocolError(401, "the request has no Authorization with the right API key", code="invalid_api_key")

    def _is_known(self, authorization: str) -> bool:
        assert self.api_key is not None
        scheme, _, key = authorization.partition(" ")
        # In a time that does not tell how much of it is right.
        is_right = hmac.compare_digest(key.strip().encode(), self.api_key.strip().encode())
        return is_right and scheme.lower() == "bearer"


def is_local(host: str) -> bool:
    """Whether a name or an address is this machine's alone."""
    host = host.rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
