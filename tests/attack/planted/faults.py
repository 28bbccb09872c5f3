"""One attack for each fault, and readers that fall for them."""

import functools
import itertools
import os
import subprocess
import time
from pathlib import Path

from moe_jax.core.errors import InputError
from tests.attack.attacks import Attack, canary


def _read(fault: str, folder: Path, out: Path) -> str:
    match fault:
        case "refused":
            raise InputError("x is 1, expected 2")
        case "refused by the disk":
            raise FileNotFoundError("x")
        case "traceback":
            return {}["key"]
        case "system exit":
            raise SystemExit(2)
        case "echo" | "long line" | "many lines":
            raise InputError({"echo": "x" * 10**6, "long line": "x" * 2000, "many lines": "x\n" * 5000}[fault])
        case "endless":
            while True:
                pass
        case "slow":
            start = time.process_time()
            while time.process_time() - start < 0.8:
                pass
        case "memory":
            return "x" * 10**10
        case "memory of a library":
            return str(len(bytearray(600_000_000)))
        case "dies":
            os._exit(1)
        case "payload":
            os.close(os.open(canary(folder), os.O_CREAT | os.O_WRONLY))
        case "program":
            subprocess.run(["true"], check=True)
        case "escape":
            (folder / "new").write_text("")
        case "escape by rename":
            (out / "new").write_text("")
            (out / "new").rename(folder / "new")
        case "output":
            (out / "new").write_text("")
    return fault


def _wrong(original: None, folder: Path, read: str) -> str | None:
    if read == "judge fails":
        raise KeyError(read)
    return "it is wrong" if read == "wrong" else None


_CALLS = itertools.count()


def _besides(fault: str) -> tuple[float, int]:
    return 9.0 * next(_CALLS) if fault == "slow process" else 0.0, 10**9 if fault == "memory of a process" else 0


VERDICTS = {
    "accepted": "accepted",
    "output": "accepted",
    "refused": "refused",
    "refused by the disk": "refused",
    "wrong": "wrong",
    "judge fails": "wrong",
    "traceback": "traceback",
    "system exit": "traceback",
    "dies": "traceback",
    "echo": "echo",
    "long line": "echo",
    "many lines": "echo",
    "endless": "hang",
    "slow": "hang",
    "memory": "memory",
    "memory of a library": "memory",
    "slow process": "hang",
    "memory of a process": "memory",
    "payload": "executed",
    "program": "executed",
    "escape": "escape",
    "escape by rename": "escape",
}
ATTACKS = tuple(
    Attack(
        name=fault,
        original=lambda: None,
        make=lambda chance, original, folder: None,
        read=functools.partial(_read, fault),
        wrong=_wrong,
        besides=functools.partial(_besides, fault),
    )
    for fault in VERDICTS
)
