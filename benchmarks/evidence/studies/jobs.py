"""Jobs, the studies that ask for them, and the loop that does them on all cores and keeps every result at once."""

import concurrent.futures
import json
import math
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from evidence.results import Key, ResultsFile

# Of a result, what differs between two runs of the same job.
SECONDS = "seconds"
# Of a result: there is no other, for the loss was not finite.
DIVERGED = "diverged"


class Place(NamedTuple):
    """Where jobs find what they need.

    Attributes:
      data: the folder of texts and models that `claims.py` describes.
      work: folder of what is kept between jobs: trained models, tokenizers, compiled programs.
      smollm: model directory or Hugging Face folder of SmolLM2-135M; None: it is not there.
    """

    data: Path
    work: Path
    smollm: Path | None = None


class Job(NamedTuple):
    """One result.

    Attributes:
      path: where it stands in the results.
      work: `work(place, **arguments)` gives the result, a dictionary of JSON values; a function of a module, since it
        is called in another process.
      arguments: of `work`.
      makes: the folder of the model that it keeps, if any. The job writes it as `new_folder` says, and it is moved when
        its result is stored.
      threads: that it computes with, where there are so many cores. Results are the same, bit for bit, on machines of
        one kind.
    """

    path: Key
    work: Callable[..., dict[str, Any]]
    arguments: Mapping[str, Any]
    makes: Path | None = None
    threads: int = 1


class Study(Protocol):
    """A part of the plan."""

    name: str

    @property
    def scale_name(self) -> str:
        """Of the models that it is about."""
        ...

    @property
    def needs(self) -> tuple[Key, ...]:
        """Where the results stand of the jobs whose models it begins with."""
        ...

    @property
    def keeps(self) -> tuple[Key, ...]:
        """Where the results stand of its own jobs that keep models."""
        ...

    def is_done(self, results: ResultsFile) -> bool:
        """Whether all results that it reports are there."""
        ...

    def jobs(self, results: ResultsFile, place: Place) -> Iterator[Job]:
        """Yields the jobs that can be done with what is there, the most telling first; also those already done."""
        ...


# Beside a kept model, the result of the job that made it.
MADE = "made.json"


class NotFiniteError(Exception):
    """A result that holds what is not a finite number."""


class DiffersError(Exception):
    """A model that was made again is not the one that the results are of."""


def open_jobs(
    studies: Sequence[Study], results: ResultsFile, place: Place, *, all_models: bool = False
) -> Iterator[Job]:
    """The jobs that can be done now and are not done, or whose model is not there any more and is needed.

    Args:
      studies: in the order in which they are worked on.
      results: what is done.
      place: where kept models are.
      all_models: whether models are made again that no open study begins with.

    Raises:
      DiffersError: if a kept model is not the one that the results are of.
    """
    needed = _needed(studies, results)
    for study in studies:
        for job in study.jobs(results, place):
            there = results.get(*job.path)
            if there is None:
                yield job
            elif job.makes is not None and not there.get(DIVERGED) and not _is_kept(job, there):
                if all_models or job.path in needed:
                    yield job


def _needed(studies: Sequence[Study], results: ResultsFile) -> set[Key]:
    """Results of the jobs whose models open studies begin with, and those with which these models begin."""
    needed: set[Key] = set()
    while True:
        more = {
            key
            for study in studies
            if not study.is_done(results) or needed.intersection(study.keeps)
            for key in study.needs
        }
        if more <= needed:
            return needed
        needed |= more


def new_folder(folder: Path) -> Path:
    """Where a job writes the model that it makes."""
    return folder.with_name(f"{folder.name}.new")


def _is_kept(job: Job, result: dict[str, Any]) -> bool:
    assert job.makes is not None
    file = job.makes / MADE
    if not file.exists():
        return False
    if not same(result, json.loads(file.read_text())):
        raise DiffersError(f"{job.makes} was kept by another run than that of the results; choose another --work")
    return True


def do_jobs(
    studies: Sequence[Study],
    results: ResultsFile,
    place: Place,
    *,
    workers: int,
    minutes: float = math.inf,
    all_models: bool = False,
) -> bool:
    """Does what is open; every result is written as soon as it is there.

    Args:
      studies: in the order in which they are worked on.
      results: read and written.
      place: where jobs find what they need.
      workers: jobs at a time, each counted as often as it has threads. A job has the same number of them however many
        workers there are, so that the results of a seed are the same, bit for bit.
      minutes: after so many no further job is begun.
      all_models: as of `open_jobs`.

    Returns:
      Whether nothing is left to do.

    Raises:
      NotFiniteError: if a job gives a result that is not finite.
      DiffersError: if a model was made again, and is another one.
      Exception: what a job raised. Those that run beside it are waited for.
    """
    failed: Exception | None = None
    started, running, done = time.monotonic(), dict[concurrent.futures.Future, Job](), 0
    with worker_pool(workers, place) as pool:
        while True:
            busy = {job.path for job in running.values()}
            in_time = time.monotonic() - started < 60 * minutes and failed is None
            for job in open_jobs(studies, results, place, all_models=all_models) if in_time else ():
                if job.path in busy:
                    continue
                if running and sum(one.threads for one in running.values()) + job.threads > workers:
                    break
                running[pool.submit(timed, job, place) if job.threads == 1 else _alone(job, place)] = job
                busy.add(job.path)
            if not running:
                if failed is not None:
                    raise failed
                return in_time
            finished, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in finished:
                job = running.pop(future)
                try:
                    store(results, job, future.result())
                    left = sum(1 for _ in open_jobs(studies, results, place, all_models=all_models))
                except Exception as error:
                    failed = failed or error
                    continue
                done += 1
                print(_line(job, future.result(), done, left, time.monotonic() - started), flush=True)


def repeat_jobs(
    studies: Sequence[Study], results: ResultsFile, place: Place, *, workers: int, count: int
) -> tuple[int, list[Key]]:
    """Does finished jobs again, spread evenly over the plan, and keeps how many gave the same bits.

    Args:
      studies: of the jobs.
      results: of the jobs; under `repeated` and the scales of the studies, what came of it.
      place: as of the jobs.
      workers: jobs at a time.
      count: of jobs, at most.

    Returns:
      How many jobs were done again, and which of them gave another result.
    """
    # Studies share the rates that were tried.
    every = {job.path: job for study in studies for job in study.jobs(results, place)}
    done = [job for job in every.values() if results.get(*job.path) and not job.makes]
    chosen = done[:: max(1, -(-len(done) // count))]
    with worker_pool(workers, place) as pool:
        again = [pool.submit(timed, job, place) for job in chosen]
        differ = [
            job.path
            for job, future in zip(chosen, again, strict=True)
            if not same(results.get(*job.path), future.result())
        ]
    scales = ", ".join(dict.fromkeys(study.scale_name for study in studies))
    results.put("repeated", scales, value={"jobs": len(chosen), "different": [" / ".join(path) for path in differ]})
    return len(chosen), differ


def worker_pool(workers: int, place: Place) -> concurrent.futures.ProcessPoolExecutor:
    """Processes with one thread each, on a core of their own as far as there are enough."""
    return _processes([[index] for index in range(workers)], place)


def _alone(job: Job, place: Place) -> concurrent.futures.Future:
    """The result of a job, from a process of its own with as many cores as it has threads, if there are so many."""
    pool = _processes([range(job.threads)], place)
    result = pool.submit(timed, job, place)
    result.add_done_callback(lambda _: pool.shutdown(wait=False))
    return result


def _processes(cores: Sequence[Sequence[int]], place: Place) -> concurrent.futures.ProcessPoolExecutor:
    """As many processes as there are sets of cores, each on its own."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    for one in cores:
        queue.put(list(one))
    return concurrent.futures.ProcessPoolExecutor(
        len(cores), mp_context=context, initializer=_begin, initargs=(queue, place.work)
    )


def timed(job: Job, place: Place) -> dict[str, Any]:
    """The result of a job, with the seconds that it took."""
    started = time.monotonic()
    return job.work(place, **job.arguments) | {SECONDS: round(time.monotonic() - started, 1)}


def checked(job: Job, result: dict[str, Any]) -> dict[str, Any]:
    """The result.

    Raises:
      NotFiniteError: if a number in it is not finite.
    """
    for name, value in result.items():
        for number in _numbers(value):
            if not math.isfinite(number):
                raise NotFiniteError(f"{' / '.join(job.path)}: {name} is {number}")
    return result


def _numbers(value: Any) -> Iterator[float]:
    """All floats in a JSON value."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _numbers(part)


def store(results: ResultsFile, job: Job, result: dict[str, Any]) -> None:
    """Writes a result, or compares it with the one that is there.

    Raises:
      NotFiniteError: if a number in it is not finite.
      DiffersError: if there was another result.
    """
    there = results.get(*job.path)
    if there is None:
        results.put(*job.path, value=checked(job, result))
    elif not same(there, result):
        raise DiffersError(
            f"{' / '.join(job.path)}: made again here, the result is another one, so that the models that are left "
            "cannot be compared with those of the results; choose another --out"
        )
    if job.makes is not None and not result.get(DIVERGED):
        made = new_folder(job.makes)
        (made / MADE).write_text(json.dumps(results.get(*job.path)))
        shutil.rmtree(job.makes, ignore_errors=True)
        made.rename(job.makes)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether all that both results of a job say is equal, bit for bit, but for the seconds."""
    return all(other[name] == value for name, value in one.items() if name in other and name != SECONDS)


def _begin(cores: Any, work: Path) -> None:
    """Prepares a worker, before JAX counts the cores that it may use."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    available = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {available[index % len(available)] for index in cores.get()})
    import jax

    # What one worker compiled, no other compiles again.
    jax.config.update("jax_compilation_cache_dir", str(work / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _end_with_parent() -> None:
    """Otherwise a worker goes on with its job, and keeps its core, when the program that wants the result is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _line(job: Job, result: dict[str, Any], done: int, left: int, seconds: float) -> str:
    """What was done; how much more is left is known only once rates are chosen."""
    losses = result.get("losses")
    said = f", mean loss {sum(losses.values()) / len(losses):.4f}" if losses else ""
    name = " / ".join(job.path)
    return f"[{done} done in {seconds / 60:.0f} min, {left} can be done now] {name}: {result[SECONDS]:.0f} s{said}"
