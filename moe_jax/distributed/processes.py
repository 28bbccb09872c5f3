"""Runs with several processes: every process makes the same calls, and the first one writes files."""

import io
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from moe_jax.core.errors import InputError, clipped
from moe_jax.distributed.coordination import Coordination
from moe_jax.distributed.job_place import Place, expected_local_devices, find_place, versions, waits
from moe_jax.kernels.hardware import bucket

T = TypeVar("T")
_others: Coordination | None = None


def join_processes() -> None:
    """Joins the other processes if `MOE_JAX_DISTRIBUTED` is set; call it before anything else uses JAX.

    This is an environment variable because it depends on the machine and not on the recipe. With the value `auto`, JAX
    detects TPU pods, Slurm, Open MPI and Kubernetes. Elsewhere it is `HOST:PORT,N,I`: the address of the first process,
    the number of processes, and the index of this one, from 0. A process drives all accelerators that it sees; the
    processes of one node under Slurm share those of the node evenly.

    From then on the processes end together: if one is killed, fails, or sends no heartbeat for
    `MOE_JAX_DISTRIBUTED_SILENCE` seconds (20), the others end with one line that says so. They wait
    `MOE_JAX_DISTRIBUTED_WAIT` seconds (300) for each other. `MOE_JAX_LOCAL_DEVICES` sets how many accelerators each
    must find, so that no job runs with fewer; under Slurm the number is known. Standard output of all processes but the
    first is dropped.

    Raises:
      InputError: if a variable has another form, the others do not come or have another version of this library, or
        there are fewer devices or processes than there should be.
    """
    place = find_place()
    if place is not None:
        _connect(place)
    _check_devices(place)


def let_first_work() -> bool:
    """For a command that one process runs: joins the others if there are any, and returns whether this is the first.

    In the others this returns when the first one is done, however long that takes; if it fails, they end with it.

    Raises:
      InputError: as `join_processes`.
    """
    place = find_place()
    if place is None:
        return True
    _connect(place, one_works=True)
    if place.index == 0:
        return True
    leave_processes()
    return False


def _connect(place: Place, *, one_works: bool = False) -> None:
    global _others
    wait, silence = waits()
    others = Coordination(place, wait=wait, silence=silence)
    _others = others  # also if it is refused: then all hear why
    others.join(versions(), one_works=one_works)
    _keep_output_apart(place)


def _keep_output_apart(place: Place) -> None:
    """Keeps standard output for the first process and this program: what libraries print goes to standard error.

    Gloo prints its connections, from C++.
    """
    try:
        is_usual = sys.stdout.fileno() == 1
    except (OSError, ValueError):  # it is closed, or no file
        is_usual = False
    if is_usual:
        sys.stdout.flush()
        own = os.dup(1)
        os.dup2(2, 1)
        sys.stdout = open(own, "w", buffering=1, encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    if place.index:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")


def _check_devices(place: Place | None) -> None:
    """Raises `InputError` if this process, or another, does not see the devices that it should."""
    expected = expected_local_devices()
    if place is None and expected is None:
        return
    count = 1 if place is None else place.count
    if jax.process_count() != count:
        raise InputError(
            f"JAX's backend ({jax.default_backend()}) knows of {jax.process_count()} processes, not of all {count}"
        )
    found = Counter(device.process_index for device in jax.devices())
    each = jax.local_device_count() if expected is None else expected
    short = [f"process {index} has {found[index]}" for index in range(count) if found[index] != each]
    if short:
        should = "all must have the same number" if expected is None else f"{expected} are expected of each"
        found_in_all = f"{len(jax.devices())} {jax.default_backend()} devices in {count} processes"
        raise InputError(f"{found_in_all}: {', '.join(short[:8])}; {should}")


def describe_devices() -> str | None:
    """Returns a sentence on the devices of all processes, and of this one; None: this process is alone."""
    if jax.process_count() == 1:
        return None
    local, kind = jax.local_device_count(), jax.devices()[0].device_kind
    return f"{jax.process_count()} processes with {local} devices each: {jax.device_count()} devices ({kind})"


def leave_processes() -> None:
    """Ends what `join_processes` began, at the end of a command that went well."""
    global _others
    if _others is not None:
        _others.leave()
        _others = None


def ask_all_to_stop(number: int) -> None:
    """Asks all processes of `join_processes` to stop after one of the next steps, because of a signal."""
    if _others is not None:
        _others.ask_to_stop(number)


def stop_after(step: int) -> int | None:
    """Returns the signal because of which all processes stop after a step that they have started; None: they go on.

    Every process makes this call after every step, and does not start one before the last but one is computed.
    """
    if _others is not None:
        return _others.stop_after(step)
    if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
        return signal.SIGTERM
    return None


def has_coordination() -> bool:
    """Whether `join_processes` has joined other processes, so that `stop_after` hears of any signal."""
    return _others is not None


def fail_together(code: int, message: str) -> None:
    """Before this process ends: tells the others, which end too, with this message. The first message counts."""
    if _others is not None:
        _others.fail(code, message)


def tell_first(news: Any) -> None:
    """Tells the first process, from another one, about progress; JSON-able, and short."""
    if _others is not None:
        _others.tell_first(news)


def news(seconds: float = 0.0) -> list[Any]:
    """Returns what others have told the first process since the last call; waits some seconds if there is nothing."""
    return [] if _others is None else _others.news(seconds)


def await_the_reason() -> None:
    """Waits a little after a computation of all processes failed, in case the reason is that another one is gone.

    Then this process hears of that, and ends with a line that says so.
    """
    if _others is not None:
        _others.await_reason()


def has_joined() -> bool:
    """Whether there are other processes, which wait for this one."""
    return _others is not None or jax.process_count() > 1


def is_first_process() -> bool:
    """Whether this is the process that writes files."""
    return jax.process_index() == 0


def first_decides(action: Callable[[], T]) -> T:
    """Runs an action in the first process; all processes return what it returned, or raise what it raised.

    A process may see an outdated state of a shared disk, and one that stops alone leaves the others waiting. So the
    first process looks, decides and writes.

    Args:
      action: its result must be JSON-able. A tuple comes back as a list in the other processes.

    Raises:
      InputError, OSError: as the first process did.
      RuntimeError: in the other processes, for any other exception in the first.
    """
    if jax.process_count() == 1:
        return action()
    if is_first_process():
        try:
            result = action()
        except BaseException as error:
            number = error.errno if isinstance(error, OSError) else None
            kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "RuntimeError")
            _said_by_first({"kind": kind, "message": str(error), "errno": number})
            raise
        _said_by_first({"result": result})
        return result
    said = _said_by_first()
    if "kind" not in said:
        return said["result"]
    message = f"the first process: {said['message']}"
    if said["errno"] is not None:
        raise OSError(said["errno"], message)
    raise _KINDS.get(said["kind"], RuntimeError)(message)


_KINDS = {"InputError": InputError, "FileNotFoundError": FileNotFoundError, "OSError": OSError}


def _said_by_first(said: Any = None) -> Any:
    """Returns what the first process says here, JSON-able."""
    meet()
    content = np.frombuffer(json.dumps(said).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int64(content.size)))
    content = content if is_first_process() else np.zeros(size, np.uint8)
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(content), np.uint8).tobytes())


def check_equal(values: Mapping[str, Any]) -> None:
    """Raises `InputError` in all processes if a value, JSON-able and by name, differs from that of the first."""
    if jax.process_count() == 1:
        return
    mine = {name: json.dumps(value, sort_keys=True) for name, value in values.items()}
    all_values = gathered(mine)
    first = all_values[0]
    for index, theirs in enumerate(all_values):
        differ = sorted(name for name in first.keys() | theirs.keys() if first.get(name) != theirs.get(name))
        if differ:
            name = differ[0]
            more = f" (and {len(differ) - 1} more: {clipped(', '.join(differ[1:]))})" if len(differ) > 1 else ""
            there, here = (clipped(values.get(name, "nothing")) for values in (theirs, first))
            raise InputError(
                f"the processes differ: {name} is {there} in process {index}, and {here} in the first{more}; start "
                "all of them alike, over the same files"
            )


def on_host(array: jax.Array) -> np.ndarray:
    """Returns the whole of an array that may lie on devices of several processes. Every process makes this call."""
    if not array.is_fully_addressable and not array.is_fully_replicated:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def wait_for_all(what: str) -> None:
    """Returns when every process has called this; `what` names the barrier in errors."""
    if jax.process_count() > 1:
        meet()
        multihost_utils.sync_global_devices(what)


def meet() -> None:
    """Returns when every process has called this, where `join_processes` has joined them.

    A collective of JAX gives up after a while (half an hour on CPUs), or keeps a device busy, if one process comes much
    later than the others.
    """
    if _others is not None:
        _others.meet()


def gathered(said: Any) -> list[Any]:
    """Returns the values of all processes, JSON-able, in the order of the processes. Every process makes the call."""
    if jax.process_count() == 1:
        return [said]
    return [json.loads(content) for content in gathered_bytes(json.dumps(said).encode())]


def gathered_arrays(said: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays of all processes, each of which has its own names. Every process makes the call.

    NumPy must be able to write them without pickling.
    """
    if jax.process_count() == 1:
        return dict(said)
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **{f"{number}": array for number, array in enumerate(said.values())})
    found: dict[str, np.ndarray] = {}
    for names, content in zip(gathered(list(said)), gathered_bytes(file.getvalue()), strict=True):
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            found |= {name: arrays[f"{number}"] for number, name in enumerate(names)}
    return found


def gathered_bytes(said: bytes) -> list[bytes]:
    """Returns the bytes of all processes, in the order of the processes. Every process makes the call."""
    if jax.process_count() == 1:
        return [said]
    meet()
    content = np.frombuffer(said, np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(content.size))).reshape(-1)
    padded = np.zeros(bucket(int(sizes.max())), np.uint8)  # few sizes, and so few programs
    padded[: content.size] = content
    rows = np.asarray(multihost_utils.process_allgather(padded), np.uint8).reshape(len(sizes), -1)
    return [row[:size].tobytes() for row, size in zip(rows, sizes.tolist(), strict=True)]
