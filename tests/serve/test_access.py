"""Who may ask, by the headers of a request."""

import pytest

from moe_jax.core.errors import InputError
from moe_jax.serve.access import Access, is_local
from moe_jax.serve.protocol_error import ProtocolError


def status(access: Access, path: str = "/v1/models", **headers: str) -> int:
    try:
        access.check(path, headers)
    except ProtocolError as error:
        assert "secret" not in error.message
        return error.status
    return 200


@pytest.mark.parametrize(
    ("authorization", "expected"),
    [("Bearer secret", 200), ("bearer  secret", 200), ("Bearer secre", 401), ("Basic secret", 401), ("Bearer é", 401)],
)
def test_a_key_has_to_be_brought_if_there_is_one(authorization, expected):
    access = Access("secret", local_only=False)
    assert status(access, authorization=authorization) == expected
    assert status(Access(None, local_only=False), authorization=authorization) == 200
    assert status(access) == 401 and status(access, "/health") == 200
    assert "secret" not in repr(access)


def test_pages_of_strange_sites_ask_nothing_of_a_server_for_this_machine():
    local, open_ = Access(), Access(local_only=False)
    for host in ("localhost:8000", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST.", "127.1.2.3", "app.localhost:80"):
        assert status(local, host=host) == status(local, host=host, origin=f"http://{host}") == 200
    for host in (
        "evil.example:8000",
        "localhost.evil.example",
        ".localhost.example",
        "mylocalhost",
        "10.0.0.1",
        "[::1",
        "0.0.0.0",
        "",
    ):
        assert status(local, host=host) == status(local, "/health", host=host) == 403
        assert status(open_, host=host) == 200
    for origin in ("https://evil.example", "null", "http://127.0.0.1.evil.example"):
        assert status(local, host="localhost", origin=origin) == 403
    assert not is_local("0.0.0.0")


@pytest.mark.parametrize("key", ["", "clé", "a\nb"])
def test_a_key_that_no_header_can_hold_is_refused(key):
    with pytest.raises(InputError, match="printable ASCII"):
        Access(key)
