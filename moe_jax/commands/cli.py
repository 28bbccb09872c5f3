"""The `moe-jax` command: a table of commands, and errors that users can act on.

Nothing here imports JAX; a command's module is imported when the command is chosen. What takes long to import is
imported inside `main`, where an interruption is a line and not a traceback.
"""

import atexit
import errno
import gc
import importlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence

import moe_jax
from moe_jax.commands.environment import (
    ask_for_huge_pages,
    avoid_absent_tpu,
    ignore_settings_of_numbers,
    imported,
    keep_compiled_programs,
    open_standard_streams,
)
from moe_jax.core.errors import SIGNALLED, USER_ERROR, InputError, clipped, first_line, nearest, printable, shown
from moe_jax.core.interruptions import interruptions, leave_at_once, number_of

COMMANDS = {
    "convert": "Hugging Face checkpoint or GGUF file to model directory",
    "export": "model directory to Hugging Face checkpoint",
    "attach": "an image encoder before a language model, which then takes pictures",
    "upcycle": "dense model to Mixture-of-Experts",
    "adapt": "adapters beside a frozen model: PERFT or LoRA",
    "compress": "a trained MoE with smaller experts, by ResMoE and other methods",
    "train": "train from a recipe, or compile the step for a TPU pod without one",
    "data": "training data of a recipe: what is learnt of it; tokenised once",
    "merge": "adapters folded into the model that they stand on",
    "eval": "perplexity on a text, accuracy of labels, or tasks of lm-eval",
    "generate": "continue a prompt, or talk with a model",
    "serve": "answer requests of the OpenAI protocol",
    "inspect": "what a model consists of, and how it came to be",
    "report": "an HTML page about models, runs, compressions and evaluations",
    "plan": "parameters and bytes of a model, from its config alone",
    "clean": "what interrupted commands left, removed",
    "demo": "the whole job, on a real language model or on a small one",
}

_WORDS = """\
words that the commands use:
  FFN              a layer's feed-forward network: most of a model's weights
  expert           one of several FFNs that a layer has instead of one; a layer
                   with experts is a Mixture-of-Experts, MoE
  router           what sends a token to some of the experts, the top k
  adapter          a few new weights beside frozen ones, such as LoRA
  MODEL            a model directory, a Hugging Face directory, a GGUF file,
                   RUN@STEP (a checkpoint of a training run), or
                   org/name[@revision], a model on the Hugging Face Hub
  model directory  what the commands write: config.json, params/, the tokenizer,
                   and lineage.json, which says how the model was made
  recipe           a TOML file: what is trained, on which data, and how long"""

_FIRST_STEPS = """\
examples:
  moe-jax upcycle llama-dir moe --experts 4 --top-k 2 --delta low-rank:16
  moe-jax inspect moe
  moe-jax train recipe.toml
  moe-jax COMMAND --help    # what a command does, its options, and examples
  moe-jax --import my_lab.parts COMMAND ...    # with routers, layers, gates of
                            # your own: this Python module registers them"""

_COMPUTING = ("train", "eval", "compress", "generate", "serve", "demo")

# All processes of a job run these commands together. Any other one is run by the first process, and the others wait.
_OF_ALL_PROCESSES = ("train", "convert", "attach", "upcycle", "merge", "compress", "eval", "generate")

# XLA's messages of this kind begin so, whatever the type of the error: JaxRuntimeError or ValueError.
_STATUS = re.compile(r"(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|DEADLINE_EXCEEDED|CANCELLED|FAILED_PRECONDITION): ")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command, given its arguments without the program's name; returns the exit code.

    A bug is not caught: it keeps its traceback.
    """
    try:
        with interruptions():
            modules, arguments = _imports_of(list(sys.argv[1:] if argv is None else argv))
            if argv is None:
                open_standard_streams()
                if _computes(arguments):
                    ask_for_huge_pages()
                # Python looks through all objects for garbage once more when it ends: half a second after JAX.
                atexit.register(gc.freeze)
            code = run_command(arguments, modules)
            if (processes := sys.modules.get("moe_jax.distributed.processes")) is not None:
                processes.leave_processes()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output went away (`| head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (InputError, OSError) as error:
        return _end(USER_ERROR, f"error: {_message(error)}{_notes(error)}")
    except KeyboardInterrupt as error:
        number = number_of(error)
        code = _end(SIGNALLED + number, f"interrupted by {signal.Signals(number).name}{_notes(error)}")
        if argv is None:
            leave_at_once(code)
        return code
    except BaseException as error:
        if _is_out_of_memory(error):
            return _end(USER_ERROR, f"error: not enough memory: {first_line(error)}{_notes(error)}")
        if _others_wait():
            if _STATUS.match(str(error)):
                sys.modules["moe_jax.distributed.processes"].await_the_reason()
            _end(1, traceback.format_exc(), f"{type(error).__name__}: {first_line(error)}")
        raise
    return code


def _computes(arguments: Sequence[str]) -> bool:
    if arguments[:1] == ["plan"]:  # it runs steps to measure training, and otherwise only reads a config
        return any(word.partition("=")[0] == "--train" for word in arguments)
    return bool(arguments) and arguments[0] in _COMPUTING


def _end(code: int, message: str, short: str | None = None) -> int:
    """Says why the command ended and returns its exit code; does not return where other processes wait for this one."""
    waited_for = _others_wait()
    if waited_for:
        # The other processes would wait for ever. They end with this message, or with its short form.
        sys.modules["moe_jax.distributed.processes"].fail_together(code, short or message.removeprefix("error: "))
    print(f"moe-jax: {message}", file=sys.stderr)
    if waited_for:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _others_wait() -> bool:
    processes = sys.modules.get("moe_jax.distributed.processes")
    return processes is not None and processes.has_joined()


def _notes(error: BaseException) -> str:
    # JAX adds one about its own traceback to errors of what it traces, and none is shown.
    notes = (note for note in getattr(error, "__notes__", ()) if "JAX has removed its internal frames" not in note)
    return "".join(f"; {note}" for note in notes)


def run_command(arguments: list[str], modules: Sequence[str] = ()) -> int:
    """Runs a command, after the modules of `--import`; returns its exit code, 0 unless it returns another one.

    Its errors and interruptions are raised, as another command that runs it needs them.
    """
    for name in modules:
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name):
            raise InputError(
                f"--import is followed by the name of a Python module, such as my_lab.parts, not by {shown(name)}"
            )
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [arguments[1], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        lines = [f"  {name:{width}}  {summary}" for name, summary in COMMANDS.items()]
        about = "Makes Mixtures-of-Experts of dense models, and trains, tunes and shrinks them."
        print("usage: moe-jax COMMAND ...", "", about, "", *lines, "", _WORDS, "", _FIRST_STEPS, sep="\n")
        return 0
    command, *rest = arguments
    if any(one.partition("=")[0] == "--import" for one in rest):
        raise InputError(f"--import comes before the command: moe-jax --import MODULE {clipped(command)} ...")
    if command == "--version":
        print(f"moe-jax {moe_jax.__version__}")
        return 0
    if command not in COMMANDS:
        hint = nearest(command, [*COMMANDS, "--version", "--help"])
        raise InputError(f"unknown command {shown(command)}{hint}; see moe-jax --help")
    from moe_jax.commands.arguments import help_of, parse_arguments
    from moe_jax.commands.options import check_options

    avoid_absent_tpu()
    ignore_settings_of_numbers()
    keep_compiled_programs()
    # Imports and tracing make many objects that stay. To look through all of them as often as Python does by itself
    # takes a fifth of their time.
    gc.set_threshold(100_000, 20, 100)
    imported[:] = modules
    for name in modules:  # not before: they import JAX, which reads its settings then
        _import_own(name)
    module = importlib.import_module(f"moe_jax.commands.{command}")
    if "-h" in rest or "--help" in rest:
        groups, examples = getattr(module, "GROUPS", None), getattr(module, "EXAMPLES", "")
        print(help_of(module.Options, command, groups=groups, examples=examples))
        return 0
    options = parse_arguments(module.Options, rest, command=command)
    if options is None:
        return 0
    check_options(options)
    if os.environ.get("MOE_JAX_DISTRIBUTED") and command not in _OF_ALL_PROCESSES:
        from moe_jax.distributed.processes import let_first_work

        if not let_first_work():
            return 0
    from moe_jax.core.terminal import shown_work

    with shown_work():
        return module.run(options) or 0


def _imports_of(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Returns the names after each `--import` before the command, and the other arguments."""
    names = []
    while arguments and arguments[0].partition("=")[0] == "--import":
        first, is_one, name = arguments.pop(0).partition("=")
        names.append(name if is_one else arguments.pop(0) if arguments else "")
    return names, arguments


def _import_own(name: str) -> None:
    """Imports a module that registers parts of the user's own, from the current folder or where it is installed."""
    here = os.getcwd()
    sys.path.insert(0, here)  # where `python -m` looks too
    try:
        importlib.import_module(name)
    except Exception as error:
        if isinstance(error, InputError) or _is_out_of_memory(error):  # InputError: of what it registers
            raise
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            absent = error.name
            raise InputError(f"--import {name}: there is no module {absent}, here or where it is installed") from None
        raise InputError(f"--import {name}: {_mistake(error)}") from None
    finally:
        if here in sys.path:  # the module may have changed it
            sys.path.remove(here)


def _mistake(error: Exception) -> str:
    """Returns where a module that is imported fails, by the last line of its own folder, and with which error."""
    if isinstance(error, SyntaxError) and error.filename:
        file, line, what = error.filename, error.lineno, error.msg
    else:
        # The first two frames are this module's and that of `import_module`; others of the import have no files.
        frames = [frame for frame in traceback.extract_tb(error.__traceback__)[2:] if frame.filename[:1] != "<"]
        if not frames:
            return f"{type(error).__name__}: {first_line(error)}"
        folder = os.path.dirname(frames[0].filename)
        last = [frame for frame in frames if frame.filename.startswith(folder)][-1]
        file, line, what = last.filename, last.lineno, first_line(error)
    return f"{file}, line {line}: {type(error).__name__}: {what}"


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether the machine, or a device, has less memory than was asked for."""
    return isinstance(error, MemoryError) or (
        type(error).__name__ == "JaxRuntimeError" and str(error).startswith("RESOURCE_EXHAUSTED")
    )


def _message(error: Exception) -> str:
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        name = str(error.filename or "")
        name = clipped(name) if error.errno == errno.ENAMETOOLONG else name
        text = f"{name}: {error.strerror}" if name else error.strerror
    return printable(text)


if __name__ == "__main__":
    sys.exit(main())
