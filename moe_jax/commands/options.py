"""The options of commands: those that several have, and those that are generated from the spec of a verb."""

import dataclasses
import os
import re
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import tyro

from moe_jax.core.errors import InputError, flag_of, raise_if_any, shown
from moe_jax.core.verb_spec import Option, Spec
from moe_jax.distributed.job_place import find_place
from moe_jax.distributed.mesh_axes import AXES, unknown_axes
from moe_jax.files.staging import refuse_existing
from moe_jax.files.storage_path import as_path, nearest_path, raise_no_file

if TYPE_CHECKING:
    from moe_jax.model_io.model_source import ModelSource
    from moe_jax.training.recipe import MeshSection, Recipe

C = TypeVar("C")
K = TypeVar("K")
S = TypeVar("S", bound=Spec)
Field = tuple[str, Any, dataclasses.Field]
_VALUES = {int: "N", float: "X", str: "TEXT"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneModel:
    """The options of a command that opens one model of any kind."""

    models: ClassVar[tuple[str, ...]] = ("model", "base")

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]
    """The model: a model directory, an adapter directory, a Hugging Face directory, a GGUF file, RUN@STEP (a checkpoint
    of a training run), or org/name on the Hugging Face Hub."""
    base: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: where it was)")] = None
    """The present path of the model that this one needs, if it was moved: the base of an adapter directory, or the
    model that the run of a checkpoint was begun with."""

    def open(self, *, towers: bool = False) -> "ModelSource":
        """Opens the model with its base, as `open_source` does."""
        from moe_jax.api.open_source import open_source

        return open_source(self.model, base=self.base, towers=towers)


def command_options(command: type[C], *specs: type[Spec], more: Collection[Field] = ()) -> type[C]:
    """Makes the options of a command: its own, those of the specs, and `more` fields.

    The docstring is that of `command`, whose fields take precedence over those of the specs.
    """
    own: Any = command
    taken = {field.name for field in dataclasses.fields(own)}
    fields = [field for spec in specs for field in map(option_field, spec.list_options()) if field[0] not in taken]
    made = dataclasses.make_dataclass("Options", [*fields, *more], bases=(command,), frozen=True, kw_only=True)
    made.__doc__ = command.__doc__
    # Where there are `more` options, the command chooses among verbs itself.
    made.specs = () if more else specs
    made.local_only = tuple(name for one in (command, *specs) for name in getattr(one, "local_only", ()))
    return made


def given_to(spec: type[S], options: Any, **more: Any) -> S:
    """Makes the spec of a verb from the options of its command and `more` values of fields."""
    return spec.of({option.name: field_value(option, options) for option in spec.list_options()} | more)


def check_options(options: Any) -> None:
    """Raises `InputError` for options that cannot be, before JAX is imported and models are read.

    Those of a verb are checked by its spec, and what a command has besides by `check` of its options. What has to be
    there is checked by `check_places`; of a command, `texts` and `models` are the options that name files of text and
    models, and `made` those that name what must not be there, as it will be made: directories, unless it `makes_file`.
    Several processes have to hear of what one of them misses: there it is found when they have joined.
    """
    for spec in getattr(options, "specs", ()):
        given_to(spec, options)
    if hasattr(options, "check"):
        options.check()
    if find_place() is not None:
        return
    if hasattr(options, "check_places"):
        options.check_places()
    for name in getattr(options, "made", ()):
        place = getattr(options, name)
        if place is not None and as_path(place).renames:
            refuse_existing(place, file=getattr(options, "makes_file", False))
    for name in getattr(options, "texts", ()):
        check_text_file(getattr(options, name))
    for name in getattr(options, "models", ()):
        given = getattr(options, name)
        for model in given if isinstance(given, tuple) else (given,):
            check_model(model)


def can_be_read_again(file: Path) -> bool:
    """Whether a file can be read here and once more later: a pipe cannot."""
    return not as_path(file).renames or not file.is_fifo()


def check_model(given: str | os.PathLike[str] | None) -> None:
    """Raises an error if there is nothing at the path of a model."""
    from moe_jax.model_io.model_names import is_absent, split_step, why_a_path

    if given is None:
        return
    if is_absent(path := os.fspath(given)):
        raise FileNotFoundError(f"no model at {path}{why_a_path(path)}{nearest_path(path)}")
    saved = split_step(Path(path))
    if saved is not None and as_path(saved[0]).renames and not saved[0].exists():
        raise FileNotFoundError(f"no training run at {saved[0]}{nearest_path(saved[0])}")


def described_model(recipe: "Recipe", file: Path) -> str | Path | None:
    """Returns where the config of a recipe's model is: its model, or the config that comes with a shipped recipe.

    Only the latter is there before the model was made, and it says enough to plan a step or to compile one.
    """
    from moe_jax.training.recipe_toml import shipped_config

    named = recipe.model.path or recipe.model.config
    return named and (shipped_config(file, named) or named)


def check_recipe(recipe: "Recipe", *, trains: bool = True) -> None:
    """Raises an error if a model, file of data or text that a recipe names is not there; as `check_text_file`.

    What only training reads, a teacher and the text of evaluation, counts if it `trains`.
    """
    for model in (recipe.model.path, recipe.model.base):
        check_model(model)
    if trains and recipe.distill is not None:
        check_model(recipe.distill.teacher)
    for source in recipe.data.sources:
        place = as_path(source.path)
        if place.renames and not any(one in source.path for one in "*?[") and not place.exists():
            raise FileNotFoundError(f"no file matches {source.path} ({place.looked_from()}){nearest_path(source.path)}")
    if trains and recipe.eval is not None:
        check_text_file(recipe.eval.text)


def check_text_file(given: str | os.PathLike[str] | None, what: str = "text") -> None:
    """Raises an error if a file of text is not there, or is empty, before a model is read.

    Of one in a bucket, and of patterns, nothing is said.
    """
    if given is None:
        return
    path = as_path(given)
    if not path.renames or any(one in str(path) for one in "*?["):
        return
    if not path.is_file():
        raise_no_file(what, path)
    if not path.stat().st_size:
        raise InputError(f"{path} is empty; give a file with a text")


def check_sources(given: Any) -> None:
    """Raises an error if the sources of a calibration cannot be read as such, or a file of theirs is not there."""
    from moe_jax.data.calibration_texts.weighted_sources import files_of, weighted_sources

    for file in files_of(weighted_sources(given)):
        check_text_file(file)


def either_options(specs: Mapping[type[Spec], Collection[str]]) -> list[Field]:
    """Returns the options of several specs, of which one will be chosen, but for those that each leaves out.

    The default of a field, None or False, stands for an option that was not given. The help says what an option means
    to each verb that has it.
    """
    listed = {spec: [one for one in spec.list_options() if one.name not in without] for spec, without in specs.items()}
    fields = []
    for name, same in by_name(listed).items():
        option = next(iter(same.values()))
        if option.kind is bool:
            fields.append(option_field(option))
            continue
        words = [word for one in same.values() for word in words_of(one.kind)]
        kind = typing.Literal[tuple(words)] if words else option.kind  # pyright: ignore[reportInvalidTypeArguments]
        texts = [f"{spec.verb()}: {_with_default(one)}" for spec, one in same.items()]
        text = "\n".join(texts) if len(same) > 1 else _with_default(option)
        metavars = dict.fromkeys(map(metavar, same.values()))
        arg = tyro.conf.arg(metavar="|".join(metavars), help=help_text(text), help_behavior_hint="")
        fields.append((name, Annotated[kind | None, arg], _default(None)))
    return fields


def by_name(listed: Mapping[K, Iterable[Option]]) -> dict[str, dict[K, Option]]:
    """Returns the options of several verbs or methods: which of them have an option of a name, and what it is there."""
    found: dict[str, dict[K, Option]] = {}
    for owner, options in listed.items():
        for option in options:
            found.setdefault(option.name, {})[owner] = option
    return found


def given_fields(fields: Collection[Field], options: Any) -> dict[str, Any]:
    """Returns the options of `either_options` that the user gave, as a spec takes them."""
    given = {name: getattr(options, name) for name, *_ in fields}
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    return {name.removeprefix("no_"): name == name.removeprefix("no_") and value for name, value in given.items()}


def option_field(option: Option) -> Field:
    """Returns name, type and default of an option as a field of a command."""
    if option.kind is bool:
        text = option.text
        if option.default:
            text = f"Skips what is done otherwise: {text[0].lower()}{text[1:]}"
        return switch_field(option, text)
    required = option.default is dataclasses.MISSING
    kind = option.kind | None if required else option.kind
    if option.shown is not None and option.shown.repeats:
        kind = tyro.conf.UseAppendAction[kind]
    hint = shown_default(option)
    behavior = "(required)" if required else f"(default: {hint})" if hint else ""
    arg = tyro.conf.arg(metavar=metavar(option), help=help_text(option.text), help_behavior_hint=behavior)
    return (option.name, Annotated[kind, arg], _default(None if required else option.default))


def switch_field(option: Option, text: str) -> Field:
    """Returns the field of an option that is on or off, with its help."""
    return (field_name(option), Annotated[bool, tyro.conf.arg(help=help_text(text))], _default(False))


def metavar(option: Option) -> str:
    """Returns the placeholder for the value of an option in the help."""
    if option.shown is not None:
        return option.shown.metavar
    if option.name.endswith("_bytes"):
        return "BYTES"
    return value_word(option.kind)


def value_word(kind: Any) -> str:
    """Returns the placeholder for a value of a type, such as `N` for an integer, or the words to choose from."""
    parts = [part for part in typing.get_args(kind) if part is not types.NoneType]
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(map(str, parts))
    if typing.get_origin(kind) is tuple:
        return f"{value_word(parts[0])} ..."
    return value_word(parts[0]) if parts else _VALUES.get(kind, "PATH")


def shown_default(option: Option) -> str:
    """Returns the default of an option in words; nothing if its text says it."""
    if option.shown is not None and option.shown.default:
        return option.shown.default
    if option.default in (None, (), "", dataclasses.MISSING):
        return ""
    return f"{option.default:g}" if isinstance(option.default, float) else str(option.default)


def _with_default(option: Option) -> str:
    default = shown_default(option)
    return f"{option.text} (default: {default})" if default else option.text


def help_text(text: str) -> str:
    """Returns a text with options as they are typed: `top_k` in backticks as --top-k."""
    return re.sub(r"`(\w+)`", lambda found: flag_of(found[1]), text)


def field_name(option: Option) -> str:
    """Returns the name of an option. A switch says what it changes: `no_step0_check` where the default is to check."""
    return f"no_{option.name}" if option.kind is bool and option.default else option.name


def field_value(option: Option, options: Any) -> Any:
    """Returns the value of an option among those of its command."""
    value = getattr(options, field_name(option))
    return not value if field_name(option) != option.name else value


def parts_of(kind: Any) -> list[Any]:
    """Returns the types of a union without None; for another type, the type itself."""
    united = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return [part for part in typing.get_args(kind) if part is not types.NoneType] if united else [kind]


def words_of(kind: Any) -> tuple[Any, ...]:
    """Returns the words that an option of a type chooses from."""
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)
    return tuple(word for part in typing.get_args(kind) for word in words_of(part))


def _default(value: Any) -> dataclasses.Field:
    return dataclasses.field(default=value)


def parse_mesh(text: str) -> dict[str, int]:
    """Reads `fsdp=8,tensor=2`: returns the sizes of the axes by name.

    Raises `InputError` for a text of another form, an axis that meshes do not have, or a size below 1.
    """
    mesh = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if not re.fullmatch(r"\s*\d{1,9}\s*", size) or axis.strip() in mesh:
            raise InputError(f"--mesh {shown(text)}: expected each axis once with its size, as in fsdp=8,tensor=2")
        mesh[axis.strip()] = int(size)
    problems = unknown_axes(mesh) + [f"{axis}={size} must be at least 1" for axis, size in mesh.items() if size < 1]
    raise_if_any(problems, f"--mesh (axes are {', '.join(AXES)})")
    return mesh


def mesh_section(mesh: Mapping[str, int]) -> "MeshSection":
    """Returns a mesh as a section of a recipe; axes that are not named have size 1."""
    from moe_jax.training.recipe import MeshSection

    return MeshSection(**{axis: mesh.get(axis, 1) for axis in AXES})
