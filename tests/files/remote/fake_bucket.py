"""An object store in this process: what the clients of `gs://` need of Google's JSON API, over HTTP.

As in such a store there is no rename and no append; an object is there as a whole or not at all. Reading a known name
is consistent at once. Listings may lag: a new object appears in them later, and a deleted one stays for as long. Faults
can be planted at any request.
"""

import contextlib
import dataclasses
import http.server
import json
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator

BUCKET = "bucket"
_OBJECT = re.compile(r"(?:/download)?(?:/storage/v1)?/b/([^/]+)/o/([^/]+)")
_OBJECTS = re.compile(r"(?:/upload|/resumable/upload)?(?:/storage/v1)?/b/([^/]+)/o")
_BUCKET = re.compile(r"(?:/storage/v1)?/b/([^/]+)")


@dataclasses.dataclass
class Stored:
    """One object; `content` is None after its deletion, while listings still show it."""

    content: bytes | None
    generation: int
    listed: bool
    changed: float


@dataclasses.dataclass
class Request:
    """What a request asks: its verb (get, put, delete, list, bucket), and the object, or the prefix of a listing."""

    verb: str
    name: str


Fault = Callable[[Request], int | None]
"""Returns a status to answer a request with instead, or None. It may also wait, or raise to cut the connection."""


class FakeBucket:
    """The state of the store: one bucket.

    Attributes:
      objects: by name.
      delay: seconds until listings notice a new object, or the end of one.
      fault: see `Fault`.
      requests: all that were served, in their order.
      bytes_read: sent as contents of objects.
      url: where it listens.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Stored] = {}
        self.delay = 0.0
        self.fault: Fault | None = None
        self.requests: list[Request] = []
        self.bytes_read = 0
        self.url = ""
        self.lock = threading.Lock()
        self._generation = 100

    def content(self, name: str) -> bytes:
        """Of an object."""
        content = self.objects[name].content
        assert content is not None, f"{name} was deleted"
        return content

    def names(self) -> list[str]:
        """Of the objects that there are, whatever listings say."""
        return sorted(name for name, stored in self.objects.items() if stored.content is not None)

    def store(self, name: str, content: bytes | None) -> Stored:
        """Writes or deletes an object."""
        old = self.objects.get(name)
        self._generation += 1
        listed = self._is_listed(old) if old else False
        stored = self.objects[name] = Stored(content, self._generation, listed, time.monotonic())
        return stored

    def listed(self, prefix: str) -> list[str]:
        """The names that a listing shows at this time."""
        return sorted(n for n, stored in self.objects.items() if n.startswith(prefix) and self._is_listed(stored))

    def _is_listed(self, stored: Stored) -> bool:
        if time.monotonic() - stored.changed >= self.delay:
            return stored.content is not None
        return stored.listed


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    bucket: FakeBucket

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path, query = self._split()
        if match := _OBJECT.fullmatch(path):
            name = urllib.parse.unquote(match[2])
            self._serve("get", match[1], name, lambda: self._get(name, query))
        elif match := _OBJECTS.fullmatch(path):
            prefix = query.get("prefix") or query.get("startOffset", "")
            self._serve("list", match[1], prefix, lambda: self._list(query))
        elif match := _BUCKET.fullmatch(path):
            self._serve("bucket", match[1], "", lambda: self._json({"name": match[1], "kind": "storage#bucket"}))
        else:
            self._error(404)

    def do_POST(self) -> None:
        path, query = self._split()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        match, name = _OBJECTS.fullmatch(path), query.get("name", "")
        if match is None or query.get("uploadType") != "media":
            self._error(400)
            return
        self._serve("put", match[1], name, lambda: self._put(name, query, body))

    def do_DELETE(self) -> None:
        path, query = self._split()
        match = _OBJECT.fullmatch(path)
        if match is None:
            self._error(404)
            return
        name = urllib.parse.unquote(match[2])
        self._serve("delete", match[1], name, lambda: self._delete(name, query))

    def _split(self) -> tuple[str, dict[str, str]]:
        parts = urllib.parse.urlsplit(self.path)
        return parts.path, dict(urllib.parse.parse_qsl(parts.query))

    def _serve(self, verb: str, bucket: str, name: str, answer: Callable[[], None]) -> None:
        request = Request(verb, name)
        try:
            status = self.bucket.fault(request) if self.bucket.fault else None
        except ConnectionError:
            self.close_connection = True
            self.connection.close()
            return
        with self.bucket.lock:
            self.bucket.requests.append(request)
            if status is not None:
                self._error(status)
            elif bucket != BUCKET:
                self._error(404, "The specified bucket does not exist.")
            else:
                answer()

    def _get(self, name: str, query: dict[str, str]) -> None:
        stored = self.bucket.objects.get(name)
        if stored is None or stored.content is None:
            self._error(404)
        elif query.get("ifGenerationNotMatch") == str(stored.generation):
            self._error(304)
        elif query.get("alt") != "media":
            self._json({"name": name, "size": len(stored.content), "generation": str(stored.generation)})
        else:
            content, status, headers = stored.content, 200, {"x-goog-generation": str(stored.generation)}
            asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
            if asked:
                size = len(content)
                start = int(asked[1]) if asked[1] else max(0, size - int(asked[2]))
                stop = min(size, int(asked[2]) + 1) if asked[1] and asked[2] else size
                if start >= size:
                    self._error(416)
                    return
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
                content, status = content[start:stop], 206
            self.bucket.bytes_read += len(content)
            self._answer(status, content, headers)

    def _list(self, query: dict[str, str]) -> None:
        names = self.bucket.listed(query.get("prefix", ""))
        start, end = query.get("startOffset", ""), query.get("endOffset")
        names = [name for name in names if name >= start and (end is None or name < end)]
        after, most = query.get("pageToken", ""), int(query.get("maxResults", 1000))
        names = [name for name in names if name > after]
        page = {"items": [{"name": name, "generation": "1", "size": "1"} for name in names[:most]]}
        self._json(page | ({"nextPageToken": names[most - 1]} if len(names) > most else {}))

    def _put(self, name: str, query: dict[str, str], body: bytes) -> None:
        if self._mismatch(name, query):
            self._error(412)
        else:
            stored = self.bucket.store(name, body)
            self._json({"name": name, "generation": str(stored.generation), "size": str(len(body))})

    def _delete(self, name: str, query: dict[str, str]) -> None:
        stored = self.bucket.objects.get(name)
        if stored is None or stored.content is None:
            self._error(404)
        elif self._mismatch(name, query):
            self._error(412)
        else:
            self.bucket.store(name, None)
            self._answer(204, b"", {})

    def _mismatch(self, name: str, query: dict[str, str]) -> bool:
        stored, wanted = self.bucket.objects.get(name), query.get("ifGenerationMatch")
        have = stored.generation if stored and stored.content is not None else 0
        return wanted is not None and int(wanted) != have

    def _json(self, data: dict) -> None:
        self._answer(200, json.dumps(data).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, message: str = "") -> None:
        said = {"error": {"code": status, "message": message or http.HTTPStatus(status).phrase}}
        self._answer(status, json.dumps(said).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        with contextlib.suppress(OSError):  # the client has gone
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            if status in (204, 304):
                content = b""
            else:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)


@contextlib.contextmanager
def serving() -> Iterator[FakeBucket]:
    """A store that listens on this machine until the block ends."""
    bucket = FakeBucket()
    handler = type("Handler", (_Handler,), {"bucket": bucket})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    bucket.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield bucket
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
