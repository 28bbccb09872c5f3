"""How many bytes of weights this process has read and written, on local disks and in buckets."""

import dataclasses
import threading


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes read and written since the process began; the difference of two is the traffic between them."""

    read: int = 0
    written: int = 0

    def __sub__(self, other: "Bytes") -> "Bytes":
        return Bytes(self.read - other.read, self.written - other.written)


_lock = threading.Lock()
_total = Bytes()


def count(*, read: int = 0, written: int = 0) -> None:
    """Adds bytes to the total."""
    global _total
    with _lock:
        _total = Bytes(_total.read + read, _total.written + written)


def total() -> Bytes:
    """Returns the total so far."""
    return _total
