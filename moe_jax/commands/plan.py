"""`moe-jax plan CONFIG_OR_MODEL`: counts the cost of a model and of its training (`--train`) from its config alone."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

import tyro

from moe_jax.commands.options import (
    command_options,
    described_model,
    either_options,
    given_fields,
    mesh_section,
    parse_mesh,
)
from moe_jax.compression.options.in_common import centre_options
from moe_jax.compression.spec import check_method
from moe_jax.core.code_options import check_scale_bits
from moe_jax.core.data_sheets import CHIPS
from moe_jax.core.errors import InputError, check_member, flag_of
from moe_jax.core.form_options import check_keep, residual_options
from moe_jax.files.storage_path import as_path, nearest_path
from moe_jax.model_io.model_names import is_absent, why_a_path
from moe_jax.peft.spec import AdaptSpec
from moe_jax.upcycling.spec import UpcycleSpec

if TYPE_CHECKING:
    from moe_jax.models import ModelConfig
    from moe_jax.planning.planned_compression import PlannedCompression
    from moe_jax.planning.planned_parts import PlannedParts
    from moe_jax.planning.planned_training import PlannedTraining
    from moe_jax.training.recipe import Recipe

_OF_COMPRESS = (
    "keep", "residual", "storage", "bits", "centre_bits", "centre_group_size", "levels", "scale_bits", "zero_points",
    "row_scales", "group_size", "compress_layers", "dtype",
)  # fmt: skip
_OF_MODEL = ("of", "rest_bits", "embedding_bits")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Command:
    """Counts the parameters and bytes of a model from its config alone.

    With options of upcycle or adapt, counts those of the model that they would make; with --compress, also the bytes of
    the experts in every form in which they can be stored; with --train, memory and time of training by a recipe.
    Weights are not read, and need not be there; of a quantised checkpoint that has them, headers are.
    """

    model: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="CONFIG_OR_MODEL")] = None
    """A config.json, ours or Hugging Face's, a directory that holds one, with weights or without, or RUN@STEP. With
    --train it is by default the recipe's."""
    train: Annotated[Path | None, tyro.conf.arg(metavar="RECIPE.toml")] = None
    """A recipe, as moe-jax train takes it. Adds what training takes of every device: parameters, gradients, moments,
    activations, and time. The step is compiled for that; weights and data are not read, nothing is written. By default
    none."""
    set: Annotated[tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]], tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """With --train: overrides keys of the recipe, as in --set train.batch_size=16 model.remat=full."""
    mesh: Annotated[str | None, tyro.conf.arg(metavar="AXIS=N,...")] = None
    """A mesh such as fsdp=8,tensor=2. Adds the bytes per chip that training needs on it: float32 except for frozen
    parameters, activations not counted. With --platform also what a step holds, what chips send each other, and the
    least time: with --train of the recipe, on this mesh in place of its own; without, of --tokens per chip in bfloat16,
    every layer computed again. Nothing is compiled for that: see moe-jax train --compile-only."""
    optimizer: Annotated[
        Literal["adamw", "adafactor", "lion", "muon"] | None, tyro.conf.arg(metavar="adamw|adafactor|lion|muon")
    ] = None
    """With --mesh: the optimizer, by default adamw."""
    compress: Annotated[str | None, tyro.conf.arg(metavar="METHOD")] = None
    """A method of moe-jax compress. Adds the bytes of the experts when it has compressed them. Of allocate, which
    chooses for every matrix, what all would take around a centre of one size; it also has matrices without a centre,
    and low-rank factors; with --of, the least and the most that a budget can ask for."""
    of: Annotated[Literal["experts", "rest", "model"] | None, tyro.conf.arg(metavar="experts|rest|model")] = None
    """With --compress quantize or allocate: what is compressed, as of moe-jax compress. Gives the bytes of every part
    of the model that it would write: experts, attention, dense FFNs, embedding, head, and the rest. By default the
    experts, in all their forms."""
    rest_bits: Annotated[int | None, tyro.conf.arg(metavar="8|4|3|2|1")] = None
    """With --of: bits of attention, dense and shared FFNs; by default --bits."""
    embedding_bits: Annotated[int | None, tyro.conf.arg(metavar="8|4|3|2|1")] = None
    """With --of: bits of the embedding and the head; by default 8, or 4 if --bits is less than 4."""
    keep: Annotated[float | None, tyro.conf.arg(metavar="SHARE")] = None
    """With --compress: the share of the experts' entries that is kept, in (0, 1]. Methods that keep a share require
    it."""
    residual: Annotated[str | None, tyro.conf.arg(metavar="up|svd|quantized[:BITS]")] = None
    """With --compress resmoe: only forms of this kind; by default all."""
    storage: Annotated[str | None, tyro.conf.arg(metavar="FORM")] = None
    """With --compress: only this form, such as csr16 or svd; by default all."""
    bits: Annotated[int | None, tyro.conf.arg(metavar="8|4|3|2")] = None
    """With --compress: bits of quantised weights, and of the values of sparse ones, which are floats by default."""
    centre_bits: Annotated[Literal["8", "4", "3", "2", "nf4"] | None, tyro.conf.arg(metavar="8|4|3|2|nf4")] = None
    """With --compress: bits of a code of the centre, which has the dtype of all parameters by default, and 4 bits
    with allocate."""
    centre_group_size: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """With --centre-bits: entries that share a scale, by default 128."""
    levels: Annotated[Literal["any", "even", "fitted"] | None, tyro.conf.arg(metavar="any|even|fitted")] = None
    """With --compress: of codes (default any); fitted ones take a table for every kernel."""
    scale_bits: Annotated[int | None, tyro.conf.arg(metavar="16|8")] = None
    """With --compress: bits of a scale of quantised weights and of a centre in codes, by default 16."""
    zero_points: bool = False
    """With --compress: every group of quantised weights has a zero point."""
    row_scales: bool = False
    """With --compress: every row of a quantised kernel has a scale, too."""
    group_size: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """With --compress: entries of quantised weights that share a scale, by default the method's, mostly 128; 0: all of
    a column."""
    compress_layers: Annotated[str | None, tyro.conf.arg(metavar="all|top:N|0,3,8-11")] = None
    """With --compress: the MoE layers to compress; by default all. Of a model with an encoder also
    encoder:SOME,decoder:SOME, counted in each stack."""
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, tyro.conf.arg(metavar="float32|bfloat16|float16")
    ] = None
    """With --compress: dtype of all parameters; by default that of the config."""
    platform: Annotated[str | None, tyro.conf.arg(metavar="|".join(CHIPS))] = None
    """A TPU generation, a GPU, or cpu. Adds the strategy by which the experts of each kind of layer would be applied
    there, for a training batch and for decoding, and the least time of every one. By default none; with --train, by
    default this machine, and also a topology such as v5e:4x4 or h100:2x8, or a slice in Google's name, such as v5p-16
    (8 chips): where to train."""
    propose: bool = False
    """With --train and a --platform that has a number of chips, such as v5p-16 or h100:2x8: the best ways to train
    there, and the command that takes the first. Every mesh that divides the model and the batch is tried from shapes
    alone, with as few microbatches as fit and the fastest remat; dtypes are the recipe's unless nothing fits with them.
    If nothing fits, says what is missing, and the smallest slice on which something does."""
    tokens: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """With --platform: tokens of a training batch on one device (default 8192), in rows of the model's context length
    or shorter."""
    pictures: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Of a model that sees: so many pictures in every row. Adds the image encoder's share of the operations of a
    training step; with --train the step is compiled with them."""
    json: bool = False
    """Prints JSON and nothing else."""

    @property
    def compiles(self) -> bool:
        """Whether a step is compiled."""
        return self.train is not None and self.mesh is None and not self.propose

    def check(self) -> None:
        """Raises `InputError` for what can be said of the options without the model."""
        if self.mesh is not None:
            parse_mesh(self.mesh)
        if self.tokens is not None and self.tokens < 1:
            raise InputError(f"tokens={self.tokens} must be at least 1")
        if self.pictures < 0:
            raise InputError(f"pictures={self.pictures} must be at least 0")
        if self.pictures and (self.propose or (self.mesh is not None and self.platform is not None)):
            raise InputError("--pictures: not with --propose, nor with --mesh and --platform, which compile nothing")
        if self.train is None and self.platform is not None:
            check_member("platform", self.platform, tuple(CHIPS))
        elif self.platform not in (None, "cpu"):
            from moe_jax.planning.planned_devices import check_platform

            check_platform(self.platform)
        _check_training(self)
        _spec(self)
        _check_compression(self)

    def check_places(self) -> None:
        """Raises an error if there is no config."""
        if self.model is not None and is_absent(self.model):
            raise FileNotFoundError(f"no config at {self.model}{why_a_path(self.model)}{nearest_path(self.model)}")


# Options of upcycle and adapt that do not change the config of the new model.
_NOT_OF_MODELS = {UpcycleSpec: ("base", "text", "allow_nonfinite"), AdaptSpec: ("text", "allow_nonfinite")}
_OF_MODELS = either_options(_NOT_OF_MODELS)
Options = command_options(_Command, more=_OF_MODELS)
GROUPS = {
    "the model of moe-jax upcycle or adapt": tuple(name for name, *_ in _OF_MODELS),
    "training by a recipe": ("train", "set", "propose"),
    "training on several chips": ("mesh", "optimizer"),
    "the model of moe-jax compress": ("compress", *_OF_MODEL, *_OF_COMPRESS),
    "time on a chip": ("platform", "tokens"),
    "a model that sees": ("pictures",),
}
EXAMPLES = """
# parameters and bytes of a model, from its config
moe-jax plan mixtral-dir/config.json
# what upcycling would make of it, and what it takes to train that on 16 chips
moe-jax plan llama-dir --experts 8 --top-k 2 --delta low-rank:16 --mesh fsdp=16
# what training by a recipe takes of this machine, or of a chip
moe-jax plan --train recipe.toml --set train.batch_size=16
moe-jax plan --train recipe.toml --platform v5e
# the same on other meshes, and what chips send each other, in seconds and without a compiler
moe-jax plan --train recipe.toml --platform v5p --mesh fsdp=16,expert=4
# which mesh, remat and microbatches to take on 8 chips
moe-jax plan --train recipe.toml --platform v5p-16 --propose
moe-jax plan mixtral-dir --platform h100 --mesh fsdp=4,expert=8
# what would be trained with adapters
moe-jax plan mixtral-dir --method perft-e --adapter parallel:8
# bytes of the experts in every form
moe-jax plan mixtral-dir --compress resmoe --keep 0.25
# bytes of every part, with attention and all else in codes, too
moe-jax plan mixtral-dir --compress quantize --bits 4 --of model
"""


def run(options: _Command) -> None:
    """Prints the plan."""
    if options.compiles and options.platform not in (None, "cpu"):
        from moe_jax.planning.planned_devices import prepare_environment

        prepare_environment()
    recipe = _recipe(options)
    model = options.model or (recipe and options.train and described_model(recipe, options.train))
    if model is None:
        raise InputError("missing: CONFIG_OR_MODEL, or --train RECIPE.toml, which names a model")
    import moe_jax
    from moe_jax.api.open_source import codes_at, read_config
    from moe_jax.commands.planned_tables import (
        print_codes,
        print_compression,
        print_parts,
        print_plan,
        print_proposals,
        print_strategies,
        print_training,
    )
    from moe_jax.peft.adapt import adapted_config
    from moe_jax.planning.planned_compression import PlannedCompression
    from moe_jax.training.recipe import OptimizerSection
    from moe_jax.upcycling.dense_to_moe import upcycled_config

    given, spec = read_config(model), _spec(options)
    config = given
    if isinstance(spec, UpcycleSpec):
        config = upcycled_config(given, spec)
    elif isinstance(spec, AdaptSpec):
        config = adapted_config(given, spec)
    training = None if options.propose else _training(recipe, config, options)
    how: dict[str, Any] = {} if spec is None else {spec.verb(): spec}
    if recipe is None:
        mesh = None if options.mesh is None else parse_mesh(options.mesh)
        optimizer = OptimizerSection(kind=options.optimizer or "adamw")
        how |= {"mesh": mesh, "optimizer": optimizer, "platform": options.platform, "tokens": options.tokens}
    elif options.propose:
        how |= {"propose": recipe, "platform": options.platform}
    planned = moe_jax.plan(given, pictures=options.pictures, **how)
    compressed, codes = _compression(config, options), codes_at(model)
    if options.json:
        described = dataclasses.asdict(planned)
        strategies = described.pop("strategies")
        proposals = described.pop("proposals")
        described |= {"compression": compressed and compressed.to_json(), "strategies": strategies, "training": None}
        described |= {"proposals": proposals, "quantized": codes and dict(codes.kinds)}
        if training is not None:
            roofline = None if training.roofline is None else training.roofline._asdict()
            described["training"] = dataclasses.asdict(training) | {"roofline": roofline}
        print(json.dumps({name: part for name, part in described.items() if part is not None}, indent=2))
        return
    print_plan(as_path(model), config, planned)
    if codes is not None:
        print_codes(codes)
    if isinstance(compressed, PlannedCompression):
        print_compression(compressed)
    elif compressed is not None:
        print_parts(compressed)
    if planned.strategies is not None:
        print_strategies(planned.strategies)
    if training is not None:
        print_training(training, of_recipe=recipe is not None)
    if planned.proposals is not None:
        print_proposals(planned.proposals, ["moe-jax", "train", str(options.train)], _overrides(options))
    if options.mesh is not None:
        from moe_jax.distributed.sharding import undivided_experts

        made = {spec.experts} if isinstance(spec, UpcycleSpec) and spec.experts else set[int]()
        for note in undivided_experts(config.expert_counts | made, parse_mesh(options.mesh)):
            print(f"note: {note}")


def _check_training(options: _Command) -> None:
    """Raises `InputError` for options of training that do not go together."""
    if options.propose:
        if options.train is None or options.platform is None:
            raise InputError("--propose: needs --train RECIPE.toml and --platform, such as v5p-16 or h100:2x8")
        if options.mesh is not None:
            raise InputError("--propose: tries every mesh; leave out --mesh")
    if options.train is None:
        if options.set:
            raise InputError("--set: only with --train")
        if options.optimizer is not None and options.mesh is None:
            raise InputError("--optimizer: only with --mesh")
        if options.tokens is not None and options.platform is None:
            raise InputError("--tokens: only with --platform")
        return
    needless = [name for name in ("optimizer", "tokens") if getattr(options, name) is not None]
    if needless:
        raise InputError(f"{', '.join(map(flag_of, needless))}: the recipe says it; change it with --set")
    if options.mesh is not None and options.platform in (None, "cpu"):
        raise InputError("--mesh with --train: only with --platform, such as v5p or h100; else use --set mesh.fsdp=8")


def _recipe(options: _Command) -> "Recipe | None":
    if options.train is None:
        return None
    from moe_jax.training.recipe import load_recipe

    recipe = load_recipe(options.train, _given_overrides(options))
    return recipe if options.mesh is None else dataclasses.replace(recipe, mesh=mesh_section(parse_mesh(options.mesh)))


def _given_overrides(options: _Command) -> list[str]:
    return [override for group in options.set for override in group]


def _overrides(options: _Command) -> list[str]:
    """Returns the overrides with which a training has the model of the plan."""
    has_weights = options.model is not None and not as_path(options.model).is_file()
    return [*_given_overrides(options), *([f"model.path={options.model}"] if has_weights else [])]


def _training(recipe: "Recipe | None", config: "ModelConfig", options: _Command) -> "PlannedTraining | None":
    if recipe is None:
        if options.mesh is None or options.platform in (None, "cpu"):
            return None
        from moe_jax.planning.planned_training import assumed_recipe

        section, platform = mesh_section(parse_mesh(options.mesh)), options.platform
        recipe = assumed_recipe(config, section, options.optimizer or "adamw", options.tokens)
    else:
        platform = options.platform
    # Imported as in `train`, so that this process takes as much memory as that one will.
    import moe_jax.training.training_run  # noqa: F401
    from moe_jax.api.open_source import read_config
    from moe_jax.planning.planned_training import planned_training

    teacher = None if recipe.distill is None else read_config(recipe.distill.teacher)
    pictures = options.pictures
    if options.compiles and not pictures and config.vision is not None:
        pictures = recipe.data.max_pictures or 0
    return planned_training(recipe, config, platform, compiles=options.compiles, pictures=pictures, teacher=teacher)


def _spec(options: _Command) -> UpcycleSpec | AdaptSpec | None:
    """Returns the spec of the verb that would change the model; None if none is asked for."""
    given = given_fields(_OF_MODELS, options)
    method = given.get("method")
    adapts = method in get_args(get_type_hints(AdaptSpec)["method"])
    spec = AdaptSpec if adapts else UpcycleSpec
    known = {option.name for option in spec.list_options()} - {*_NOT_OF_MODELS[spec]}
    needless = [flag_of(name) for name in given if name not in known]
    if needless:
        how = f"--method {method}" if method else "upcycling; to adapt a model takes --method"
        raise InputError(f"{', '.join(needless)}: does not go with {how}")
    return spec.of(given) if given else None


def _check_compression(options: _Command) -> None:
    """Raises `InputError` for options of a compression without one, or that its method does not have."""
    given = {name: getattr(options, name) for name in (*_OF_MODEL, *_OF_COMPRESS)}
    if options.compress is None:
        needless = [name for name, value in given.items() if value is not None and value is not False]
        if needless:
            raise InputError(f"{', '.join(map(flag_of, needless))}: only with --compress")
        return
    check_method(options.compress)
    needless = [flag_of(name) for name in ("rest_bits", "embedding_bits") if given[name] is not None]
    if options.of is None and needless:
        raise InputError(f"{', '.join(needless)}: only with --of model or --of rest")
    if options.keep is not None:
        check_keep(options.keep)
    if options.scale_bits is not None:
        check_scale_bits(options.scale_bits)
    if options.residual is not None:
        check_member("residual", options.residual.partition(":")[0], tuple(residual_options()))
    centre_options(options.centre_bits, options.centre_group_size)


def _compression(config: "ModelConfig", options: _Command) -> "PlannedCompression | PlannedParts | None":
    if options.compress is None:
        return None
    if options.of is not None:
        from moe_jax.planning.planned_parts import planned_parts

        how = {"compress_layers": options.compress_layers, "dtype": options.dtype}
        named = ((name, getattr(options, name)) for name in (*_OF_MODEL, *_OF_COMPRESS) if name not in how)
        given = {name: value for name, value in named if value is not None and value is not False}
        return planned_parts(config, options.compress, given, **how)
    from moe_jax.planning.planned_compression import planned_compression

    return planned_compression(config, options.compress, **{name: getattr(options, name) for name in _OF_COMPRESS})
