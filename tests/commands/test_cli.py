import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest
import tyro

from moe_jax.api.open_source import open_source
from moe_jax.commands import cli, environment
from moe_jax.core.errors import InputError
from tests.support.disks import ROOT, run_python


@dataclasses.dataclass(frozen=True)
class Options:
    """What convert does."""

    local_only: ClassVar[tuple[str, ...]] = ("src",)

    src: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SRC")]
    """Where from."""
    top_k: int = 2
    """Experts per token."""
    rate: float | None = None
    """A rate."""
    kind: Literal["full", "none"] = "full"
    """A kind."""
    dry_run: bool = False
    """Writes nothing."""
    dtype: Literal["bfloat16", "float16"] | None = None
    """A dtype."""
    layers: tuple[int, ...] | None = None
    """Layers."""


@pytest.fixture
def convert(monkeypatch):
    """Puts a command in the place of `convert` that keeps its options, or does what `convert.do` says."""
    command = types.SimpleNamespace(Options=Options, seen=[], do=lambda options: None)
    command.run = lambda options: command.seen.append(options) or command.do(options)
    monkeypatch.setitem(sys.modules, "moe_jax.commands.convert", command)
    return command


def fail(error):
    def run(_):
        raise error

    return run


def test_options_reach_the_command(convert):
    assert cli.main(["convert", "a/b", "--top-k", "3", "--dry-run"]) == 0
    assert convert.seen == [Options(Path("a/b"), 3, dry_run=True)]


def test_overview_names_every_command(capsys):
    for arguments in ([], ["--help"], ["-h"]):
        assert cli.main(arguments) == 0
        out, err = capsys.readouterr()
        assert all(f"  {name} " in out for name in cli.COMMANDS) and not err
        assert max(map(len, out.splitlines())) <= 80


def test_help_may_come_first(capsys):
    assert cli.main(["help", "inspect"]) == 0
    assert capsys.readouterr().out.startswith("usage: moe-jax inspect [-h] [OPTIONS] MODEL")
    assert cli.main(["help", "inspec"]) == 2
    assert "did you mean 'inspect'?" in capsys.readouterr().err


def test_every_command_of_the_table_has_a_module():
    for name in cli.COMMANDS:
        assert (ROOT / "moe_jax" / "commands" / f"{name}.py").is_file(), name


def test_help_does_not_import_jax():
    program = """
import sys
from moe_jax.commands import cli
for arguments in (["--help"], ["inspect", "--help"]):
    assert cli.main(arguments) == 0
assert "jax" not in sys.modules and "orbax" not in sys.modules
"""
    ran = run_python(program, imports=None)
    assert ran.returncode == 0, ran.stderr
    assert "usage: moe-jax inspect [-h] [OPTIONS] MODEL" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convrt"], "unknown command 'convrt' (did you mean 'convert'?); see moe-jax --help"),
        (["train", "a", "--resum", "--sett"], "--resum (did you mean '--resume'?) --sett (did you mean '--set'?); see"),
        (["convert", "a", "--topk"], "unknown: --topk (did you mean '--top-k'?); see"),
        (["--verison"], "unknown command '--verison' (did you mean '--version'?); see moe-jax --help"),
        (["convert", "a", "--top-k", "x"], "--top-k: expected an integer, got 'x'; see"),
        (["convert", "a", "--rate", "it's"], '--rate: expected a number, got "it\'s"; see'),
        (["convert", "a", "--layers", "1,2"], "--layers: expected integers with spaces between them, got '1,2'; see"),
        (["convert", "-k", "2", "a"], "unknown: -k; see"),
        (["convert", "a", "--top-k", "9" * 5000], "--top-k: Exceeds the limit (4300 digits)"),
        (["convert", "a", "--top-k", str(2**63)], "--top-k: 9223372036854775808 does not fit into 64 bits; see"),
        (["convert", "a", "--top-k"], "--top-k needs a value"),
        (["convert", "a", "--rate", "nan"], "--rate: expected a finite"),
        (["convert", "a", "--rate", "-inf"], "--rate: expected a finite number, got -inf; see"),
        (["convert", "a", "--kind", "flll"], "--kind: expected one of full, none, got 'flll' (did you mean 'full'?)"),
        (["convert"], "missing: SRC; see moe-jax convert --help"),
        (["convert", "a", "b"], "unknown: b; see moe-jax convert --help"),
        (["convert", "--topk"], "unknown: --topk (did you mean '--top-k'?); see"),
        (["convert", "--top-k", "-1"], "missing: SRC; see"),
        (["convert", "a", *["b"] * 5000], "unknown: b b b"),
        (["convert", "a", "--kind", "x" * 100_000], "got 'xxxx"),
        (["x" * 100_000], "unknown command 'xxxx"),
        (["convert", "gs://bucket/model"], "'gs://bucket/model' is an address"),
        (["convert", "https://huggingface.co/a/b"], "'https://huggingface.co/a/b' is an address"),
        (["convert", "a\0b"], r"'a\x00b' holds a zero"),
    ],
)
def test_usage_errors_are_one_line(convert, capsys, arguments, message):
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert err.startswith("moe-jax: error: ") and message in err
    assert err.count("\n") == 1 and len(err) < 300 and not out and not convert.seen


@pytest.mark.parametrize("words", [("--dtype", "bf16"), ("--dtype=bf16",), ("--dtype", "bfloat16")])
def test_dtypes_have_short_names(convert, words):
    assert cli.main(["convert", "a", *words]) == 0
    assert convert.seen == [convert.Options(Path("a"), dtype="bfloat16")]


def test_a_short_name_of_no_choice_is_told_as_it_was_given(convert, capsys):
    assert cli.main(["convert", "a", "--dtype", "fp32"]) == 2
    assert "got 'fp32'; see" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_usage_errors_read_the_same_on_every_terminal(encoding):
    program = "import sys; from moe_jax.commands import cli; sys.exit(cli.main(['inspect', 'a', '--jsn']))"
    ran = run_python(program, encoding=encoding)
    assert ran.returncode == 2
    expected = "unknown: --jsn (did you mean '--json'?); see moe-jax inspect --help"
    assert ran.stderr == f"moe-jax: error: {expected}\n"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (InputError("x is wrong"), "x is wrong"),
        (FileNotFoundError("no model at x"), "no model at x"),
        (FileNotFoundError(2, "No such file or directory", "x/y"), "x/y: No such file or directory"),
        (PermissionError(13, "Permission denied", "x"), "x: Permission denied"),
        (OSError(28, "No space left on device", "/full/model"), "/full/model: No space left on device"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_errors_of_the_user_are_one_line(convert, capsys, error, message):
    convert.do = fail(error)
    assert cli.main(["convert", "a"]) == 2
    assert capsys.readouterr().err == f"moe-jax: error: {message}\n"


def test_what_the_parser_does_not_report_is_taken_from_its_words(convert, capsys, monkeypatch):
    """A later tyro may have other reports, or none."""
    monkeypatch.setattr("moe_jax.commands.arguments._PROBLEMS", {})
    for absent in (False, True):
        if absent:
            monkeypatch.setattr("moe_jax.commands.arguments._parser_reports_to", lambda _: contextlib.nullcontext())
        assert cli.main(["convert", "a", "--topk"]) == 2
        err = capsys.readouterr().err
        assert "--topk" in err and err.isascii() and err.count("\n") == 1
        assert err.endswith("see moe-jax convert --help\n")


def test_a_long_name_is_not_repeated(convert, capsys):
    convert.do = lambda _: open("x" * 5000)
    assert cli.main(["convert", "a"]) == 2
    err = capsys.readouterr().err
    assert err.endswith("...: File name too long\n") and len(err) < 150


def test_too_little_memory_is_no_bug_of_ours(convert, capsys):
    """JAX says so in an error of a class that it has for everything."""
    convert.do = fail(type("JaxRuntimeError", (RuntimeError,), {})("RESOURCE_EXHAUSTED: Out of memory\nmore"))
    assert cli.main(["convert", "a"]) == 2
    assert capsys.readouterr().err == "moe-jax: error: not enough memory: RESOURCE_EXHAUSTED: Out of memory\n"
    convert.do = fail(MemoryError())
    assert cli.main(["convert", "a"]) == 2
    assert capsys.readouterr().err == "moe-jax: error: not enough memory: MemoryError\n"
    convert.do = fail(type("JaxRuntimeError", (RuntimeError,), {})("INTERNAL: a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["convert", "a"])


def test_whatever_a_message_holds_a_terminal_shows_it(convert, capsys):
    convert.do = fail(InputError("a\x1b[2Jb \udcff\n" + "x" * 5000))
    assert cli.main(["convert", "a"]) == 2
    assert capsys.readouterr().err == "moe-jax: error: a\\x1b[2Jb \\udcff\n" + "x" * 997 + "...\n"


def test_bugs_keep_their_traceback(convert):
    convert.do = fail(ValueError("ours"))
    with pytest.raises(ValueError, match="ours"):
        cli.main(["convert", "a"])


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signals_say_and_do_the_same(convert, capsys, name):
    closed = []

    def interrupted(options):
        with contextlib.ExitStack() as stack:
            stack.callback(closed.append, name)
            os.kill(os.getpid(), getattr(signal, name))
            time.sleep(10)

    convert.do = interrupted
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    assert cli.main(["convert", "a"]) == 128 + getattr(signal, name)
    assert capsys.readouterr().err == f"moe-jax: interrupted by {name}\n" and closed == [name]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


def test_an_interruption_before_a_command_begins_is_a_line_too(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_imports_of", lambda arguments: signal.raise_signal(signal.SIGTERM))
    assert cli.main(["convert", "a"]) == 143
    assert capsys.readouterr().err == "moe-jax: interrupted by SIGTERM\n"
    # What takes long to import is imported there, and not with the program.
    code = "import sys, moe_jax.commands.cli\nassert not {'numpy', 'tyro', 'jax'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_an_interrupted_program_ends_without_the_end_of_the_interpreter(convert, monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(sys, "argv", ["moe-jax", "convert", "a"])
    monkeypatch.setattr(cli, "open_standard_streams", lambda: None)
    monkeypatch.setattr("atexit.register", lambda function: None)
    monkeypatch.setattr("atexit._run_exitfuncs", lambda: ended.append("what is to be done at the end"))
    monkeypatch.setattr("os._exit", ended.append)
    convert.do = lambda options: signal.raise_signal(signal.SIGTERM)
    cli.main()
    assert ended == ["what is to be done at the end", 143]
    assert capsys.readouterr().err == "moe-jax: interrupted by SIGTERM\n"


def test_what_an_error_notes_is_said(convert, capsys):
    error = OSError(28, "No space left on device", "out")
    error.add_note("what is done so far is kept")
    convert.do = fail(error)
    assert cli.main(["convert", "a"]) == 2
    assert capsys.readouterr().err == "moe-jax: error: out: No space left on device; what is done so far is kept\n"


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    program = f"{sys.executable} -m moe_jax.commands.cli --help | true; echo ${{PIPESTATUS[0]}}"
    for _ in range(3):
        ran = subprocess.run(["bash", "-c", program], capture_output=True, text=True, cwd=ROOT)
        assert ran.stdout.strip() in ("0", "1") and not ran.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full"])
def test_streams_that_are_closed_or_full_are_no_bug(closed):
    program = f"{sys.executable} -m moe_jax.commands.cli --version {closed}"
    ran = subprocess.run(["bash", "-c", program], capture_output=True, text=True, cwd=ROOT)
    full = closed == ">/dev/full"
    assert ran.returncode == (2 if full else 0) and ("No space left" in ran.stderr) == full
    assert ran.stderr.count("\n") == full


def test_characters_that_the_terminal_does_not_have_are_escapes():
    program = (
        "from moe_jax.commands.environment import open_standard_streams; open_standard_streams(); print('a\\U0001f98a')"
    )
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert ran.stdout == "a\\U0001f98a\n" and not ran.stderr


def test_settings_of_numbers_do_not_reach_a_command(convert, monkeypatch):
    settings = {"JAX_ENABLE_X64": "1", "JAX_NUMPY_DTYPE_PROMOTION": "strict", "JAX_NUMPY_RANK_PROMOTION": "raise"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["convert", "a"]) == 0
    assert not settings.keys() & os.environ.keys()


@pytest.mark.parametrize(
    ("devices", "chosen", "expected"),
    [((), None, "cpu"), ((), "tpu", "tpu"), (("accel0",), None, None), (("nvidia0",), None, None)],
)
def test_a_tpu_is_looked_for_only_where_one_may_be(convert, monkeypatch, tmp_path, devices, chosen, expected):
    for device in devices:
        (tmp_path / device).touch()
    monkeypatch.setattr(environment, "Path", lambda _: tmp_path)
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: name)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if chosen:
        monkeypatch.setenv("JAX_PLATFORMS", chosen)
    assert cli.main(["convert", "a"]) == 0
    assert os.environ.get("JAX_PLATFORMS") == expected


def test_open_source_says_what_it_found(tmp_path):
    with pytest.raises(FileNotFoundError, match="no model at"):
        open_source(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="model directory"):
        open_source(tmp_path / "file")
    with pytest.raises(InputError, match="it holds file;"):
        open_source(tmp_path)
    for number in range(6):
        (tmp_path / f"a{number}").touch()
    with pytest.raises(InputError, match="a5 and 1 more;"):
        open_source(tmp_path)
    for content, complaint in [("{", "not valid JSON"), ("[]", "holds a JSON list"), ("{}", "has neither format nor")]:
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(InputError, match=f"config.json .*{complaint}"):
            open_source(tmp_path)


def test_the_end_of_a_command_is_not_spent_on_garbage():
    # What lies in rings is left to the system: Python would look through all that JAX made.
    code = "import sys, moe_jax.commands.cli as cli\nsys.argv = ['moe-jax', '--version']\n"
    code += "class Ring:\n    def __del__(self, say=print):\n        say('looked')\n"
    code += "ring = Ring()\nring.ring = ring\ndel ring\ncli.main()"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("moe-jax") and "looked" not in shown
