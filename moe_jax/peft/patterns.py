"""Matches regular expressions from users within a bounded time.

Python's matcher may take time that grows exponentially with a name (`(a+)+b`), and while it runs, nothing else in the
process can. So a separate process matches, and is ended when it has used too much time.
"""

import json
import subprocess
import sys
from collections.abc import Sequence

_SECONDS = 1  # of processor time, for all patterns; they take milliseconds
_BYTES = 1 << 30
_LONGEST_WAIT = 60  # seconds by the clock, on a machine that is busy

_PROGRAM = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({_SECONDS}, {_SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, ({_BYTES}, {_BYTES}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    try:
        match = re.compile(pattern).fullmatch
    except Exception as error:
        print(json.dumps(f"is not a regular expression: {{error}}"), flush=True)
    else:
        print(json.dumps([i for i, name in enumerate(names) if match(name)]), flush=True)
"""


def full_matches(patterns: Sequence[str], names: Sequence[str]) -> list[set[str] | str]:
    """Returns for each pattern the names that it matches as a whole, or a text that says what is wrong with it.

    Patterns after one that takes too long have no entry.
    """
    if not patterns:
        return []
    try:
        ran = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            input=json.dumps([list(patterns), list(names)]).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_LONGEST_WAIT,
        )
        printed = ran.stdout
    except subprocess.TimeoutExpired as expired:
        printed = expired.output or b""
    found: list[set[str] | str] = []
    for line in printed.splitlines(keepends=True):
        if line.endswith(b"\n"):
            answer = json.loads(line)
            found.append(answer if isinstance(answer, str) else {str(names[i]) for i in answer})
    if len(found) < len(patterns):
        found.append("takes too long to match; write it without repetitions inside repetitions")
    return found
