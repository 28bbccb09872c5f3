"""`moe-jax demo`: every step, on a real language model, with an eye for it, or quickly on a small one."""

import dataclasses
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from moe_jax.commands.options import check_model
from moe_jax.core.errors import InputError, flag_of

TUNING_STEPS, DENSE_STEPS, MORE_STEPS = 12, 180, 70
PROJECTOR_STEPS, STAGE_3_STEPS = 120, 45
# The option of the demo that has these steps, and whether that is given.
_STEPS = {
    "tuning_steps": ("model", True),
    "dense_steps": ("model", False),
    "more_steps": ("model", False),
    "projector_steps": ("tower", True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Upcycles and tunes a language model, makes it smaller in three ways, and shows what it says before and after.

    Without --model, a small model is trained on Python's own source first, offline. With --tower, the language model
    gets an eye, learns to see, and is asked about pictures.
    """

    local_only: ClassVar[tuple[str, ...]] = ("model", "tower", "dir")

    model: Annotated[Path | None, tyro.conf.arg(metavar="GGUF|DIR|ORG/NAME")] = None
    """A dense language model with a chat template, such as SmolLM2-135M-Instruct, which `make demo` fetches. By
    default the quick demo."""
    tower: Annotated[Path | None, tyro.conf.arg(metavar="DIR|ORG/NAME")] = None
    """With --model: an image encoder, such as DINOv2-S, which `make demo-vision` fetches; the model learns to see
    (default: it stays a model of text)."""
    quick: bool = False
    """The demo on a small model, which needs no other one."""
    dir: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("moe-jax-demo")
    """Where everything goes; a folder made by an earlier demo is replaced."""
    resume: bool = False
    """Goes on with the demo in that folder, which was stopped; the other options must be the same."""
    tuning_steps: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """With --model: steps of the tuning, each on 384 tokens (default 12); with --tower, of the third stage, each of
    four pictures (default 45)."""
    projector_steps: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """With --tower: steps of the first stage, which trains the projector, each of eight pictures (default 120)."""
    dense_steps: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Without --model: training steps of the dense model (default 180)."""
    more_steps: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Without --model: training steps that every model gets after it (default 70)."""

    def check(self) -> None:
        """Raises an error for options that do not go together or are out of range."""
        if self.quick and self.model is not None:
            raise InputError("--quick makes its own model; leave out --model")
        if self.tower is not None and self.model is None:
            raise InputError("--tower is the eye of a language model; add --model")
        for name, (option, with_it) in _STEPS.items():
            given = getattr(self, name)
            if given is None:
                continue
            if with_it != (getattr(self, option) is not None):
                raise InputError(f"{flag_of(name)}: only {'with' if with_it else 'without'} {flag_of(option)}")
            if given < 1:
                raise InputError(f"{flag_of(name)}={given} must be at least 1")

    def check_places(self) -> None:
        """Raises an error if there is no model."""
        check_model(self.model)
        check_model(self.tower)


EXAMPLES = """
make demo
make demo-vision
moe-jax demo --model HuggingFaceTB/SmolLM2-135M-Instruct
moe-jax demo --quick
moe-jax demo --quick --resume    # after Ctrl-C: goes on where it was stopped
"""


def run(options: Options) -> None:
    """Runs the demo."""
    import rich.console

    from moe_jax.commands.cli import run_command
    from moe_jax.core.interruptions import Interrupted
    from moe_jax.demo import run_quick_demo, run_real_demo, run_vision_demo
    from moe_jax.demo.shell import Shell
    from moe_jax.training.loop import Stopped

    # The commands print on standard output; the console must not hold back lines between them.
    console = rich.console.Console(soft_wrap=True)
    shell = Shell(console, run_command, again=command_again(options), resume=options.resume)
    if options.model is None and not options.quick:
        shell.console.print("no --model: the demo on a small model (make demo fetches a real one)", highlight=False)
    try:
        if options.model is not None and options.tower is not None:
            steps = {
                "projector": options.projector_steps or PROJECTOR_STEPS,
                "tuning": options.tuning_steps or STAGE_3_STEPS,
            }
            run_vision_demo(options.dir, options.model, options.tower, **steps, shell=shell)
        elif options.model is not None:
            run_real_demo(options.dir, options.model, steps=options.tuning_steps or TUNING_STEPS, shell=shell)
        else:
            dense_steps, more_steps = options.dense_steps or DENSE_STEPS, options.more_steps or MORE_STEPS
            run_quick_demo(options.dir, dense_steps=dense_steps, more_steps=more_steps, shell=shell)
    except Stopped as stopped:
        interrupted = Interrupted(stopped.signal)
        for note in getattr(stopped, "__notes__", ()):
            interrupted.add_note(note)
        raise interrupted from None


def command_again(options: Options) -> str:
    """Returns the command that goes on with a demo with these options, as the user can give it."""
    # In a virtual environment that is not active, `make demo` names the program by its path.
    started = sys.argv[0]
    program = started if shutil.which("moe-jax") is None and Path(started).name == "moe-jax" else "moe-jax"
    words = [program, "demo"]
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name != "resume" and value != field.default:
            words += [f"--{field.name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return shlex.join([*words, "--resume"])
