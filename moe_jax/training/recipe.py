"""A recipe: one TOML file that describes a training run completely.

Relative paths in a recipe are relative to the current directory and not to the recipe, so that the resolved recipe in
the run directory means the same when it is run again from the same directory. If model, data or run were moved, a run
is continued with the new paths: the contents of the files count (`run_directory`).
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from moe_jax.core.errors import MAX_SIZE, InputError, is_finite, shown
from moe_jax.core.formatting import short_repr
from moe_jax.data.sections import DataSection, FieldsSection, Format, SourceSection, at_least
from moe_jax.files import json_toml
from moe_jax.files.json_toml import read_toml
from moe_jax.files.staging import check_model_path
from moe_jax.files.storage_path import as_path
from moe_jax.training import recipe_toml
from moe_jax.training.balance.moe_section import MoESection


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The model that is trained, and how it computes.

    Attributes:
      path: a model directory, a Hugging Face directory, or `RUN@STEP`; training starts from its weights.
      base: if the model at `path` is an adapter directory whose base was moved: where the base is now.
      config: instead of `path`, a config.json alone (of this library or Hugging Face's): for `init = "random"` and
        for `--compile-only`.
      init: `checkpoint` starts from the weights at `path`, `random` from new ones drawn with the seed.
      param_dtype: dtype of the trained parameters; in bfloat16 every update is rounded stochastically, because most
        updates are smaller than a step of bfloat16.
      frozen_dtype: dtype of the parameters that are not trained. None: as stored. NF4 kernels are always as stored.
      compute_dtype: dtype of the matrix products.
      output_dtype: dtype of the final model that is written. None: every parameter in the dtype in which the model at
        `path` stores it, and `param_dtype` if training started from new weights. Checkpoints keep `param_dtype`.
      remat: what the backward pass computes again instead of keeping it: nothing, every layer (`full`), or
        every layer but its matrix products (`dots`).
      exchange: how tokens come to their experts over the mesh axis `expert`: `all-gather` brings all tokens to every
        device, `all-to-all` rows to the devices of their experts, and `auto` takes the one that sends fewer bytes.
        `all-to-all:CAPACITY` (or `all-gather:CAPACITY`) sets the room of a device for rows, in multiples of the even
        share (2); further rows come in further rounds, so that nothing is dropped. None: `auto`, or what
        MOE_JAX_EXCHANGE says.
      check_exchange: whether the first step by all-to-all is compared with the same step by all-gather, which takes
        another program. None: on GPUs, where wrong gradients have been reported.
    """

    path: str | None = None
    base: str | None = None
    config: str | None = None
    init: Literal["checkpoint", "random"] = "checkpoint"
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    frozen_dtype: Literal["float32", "bfloat16"] | None = None
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    output_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    remat: Literal["none", "full", "dots"] = "none"
    exchange: str | None = None
    check_exchange: bool | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.exchange is not None:
            from moe_jax.experts.exchange import Exchange

            Exchange.parse(self.exchange, "exchange")
        if (self.path is None) == (self.config is None):
            raise InputError("give either path (a model with weights) or config (a config.json alone)")
        if self.base is not None and self.path is None:
            raise InputError("base goes with path: it is what the model at path stands on")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionSection:
    """The parameters that are trained.

    Without `train`, all parameters are trained; in a model with a frozen base, only adapters, LoRA, and routers that
    choose among adapters.

    Patterns are regular expressions that must match a whole leaf path, such as `layers/3/mlp/router/kernel` (`moe-jax
    inspect` lists them): `layers/.*/attention/.*`, `.*/router/.*`, `embed/.*|lm_head/.*`.

    Attributes:
      train: patterns of parameters that are trained. None: all, or in a model with a frozen base its adapters.
      freeze: patterns of parameters that are not trained, whatever `train` says.
    """

    train: tuple[str, ...] | None = None
    freeze: tuple[str, ...] = ()

    __repr__ = short_repr


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupSection:
    """Parameters with their own learning rate or weight decay.

    Attributes:
      match: regular expressions; a parameter whose leaf path one of them matches as a whole (as in `partition`)
        belongs to the group, if it is trained and no earlier group has it.
      learning_rate: the highest learning rate of the group, with the optimizer's schedule. None: the optimizer's.
      weight_decay: of the group, also for embeddings and routers, but for nothing that is never decayed. None: the
        optimizer's.
    """

    match: tuple[str, ...]
    learning_rate: float | None = None
    weight_decay: float | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if not self.match:
            raise InputError("match is empty: a group needs a pattern")
        if self.learning_rate is None and self.weight_decay is None:
            raise InputError("give the group a learning_rate or a weight_decay")
        at_least(self, 0, "learning_rate", "weight_decay")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """AdamW, or another optimizer of Optax's.

    Attributes:
      kind: `adamw`; `adafactor`, whose second moments are factored and take few bytes (for matrices with both sides at
        least 128), without momentum; `lion`, with one moment and updates of one size, for rates 3 to 10 times smaller
        than AdamW's and decays as much larger; `muon`, which makes the updates of every kernel of a layer orthogonal,
        and leaves embeddings, head, routers, norms and biases to AdamW with the same rate and decay.
      learning_rate: the highest learning rate, reached after the warm-up.
      b1, b2: decay rates of the moments: of AdamW (also where `muon` uses it), and of Lion, which usually has b2 = 0.98
        or 0.99.
      eps: epsilon of AdamW.
      momentum: decay rate of the moment of `muon`.
      parameter_scale: whether `adafactor` or `adamw` multiplies the rate of a matrix by the root mean square of its
        weights; rates near 1e-2 are then usual.
      moments: dtype of the first moment. Second moments are float32: in bfloat16 they would stand still.
      weight_decay: decoupled, multiplied by the learning rate. Norms, biases, scales of blocks and experts, sinks of
        attention, and rates and skips of recurrent layers are never decayed.
      decay_embeddings, decay_router: whether these are decayed as well.
      clip_norm: gradients are scaled down to this global norm. 0: never.
      groups: parameters with rates of their own.
    """

    kind: Literal["adamw", "adafactor", "lion", "muon"] = "adamw"
    learning_rate: float = 3e-4
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95
    parameter_scale: bool = False
    moments: Literal["float32", "bfloat16"] = "float32"
    weight_decay: float = 0.1
    decay_embeddings: bool = False
    decay_router: bool = False
    clip_norm: float = 1.0
    groups: tuple[GroupSection, ...] = ()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps"):
            value = getattr(self, name)
            if not (is_finite(value) and value > 0):
                raise InputError(f"{name} = {shown(value)} must be above 0 and finite")
        for name in ("b1", "b2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} = {getattr(self, name)} must lie in [0, 1)")
        at_least(self, 0, "weight_decay", "clip_norm")
        if self.kind == "adafactor" and self.moments != "float32":
            raise InputError(f"moments = {shown(self.moments)}: adafactor has no first moment; leave the key out")
        if self.kind not in ("adafactor", "adamw") and self.parameter_scale:
            raise InputError(f"parameter_scale is adafactor's and adamw's; kind = {shown(self.kind)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleSection:
    """Learning rate over the steps: linear warm-up from 0, then `kind` down to `final_ratio` of the highest.

    Attributes:
      kind: the form of the decay; `wsd` (warm-up, stable, decay) stays at the highest rate, and is linear over the last
        `decay_steps`.
      warmup_steps: steps of the warm-up.
      decay_steps: of `wsd`: steps of the decay. None: a tenth of all.
      final_ratio: the rate at the end of the decay, relative to the highest.
      steps: the step at which the decay ends, warm-up included; after it the rate stays constant. None: the
        `train.steps` that the run began with, however long it is continued.
    """

    kind: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_steps: int = 0
    decay_steps: int | None = None
    final_ratio: float = 0.1
    steps: int | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        at_least(self, 0, "warmup_steps")
        at_least(self, 1, "steps", "decay_steps")
        if not 0 <= self.final_ratio <= 1:
            raise InputError(f"final_ratio = {self.final_ratio} must lie in [0, 1]")
        if self.decay_steps is not None and self.kind != "wsd":
            raise InputError(f"decay_steps is of wsd; kind = {shown(self.kind)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmaSection:
    """An exponential moving average of the trained parameters, float32, saved in checkpoints.

    Biases of selection that `moe.bias_update_rate` moves are not averaged: they are those of the last step.

    Attributes:
      decay: share of itself that the average keeps in a step; early steps keep less, (1 + step) / (10 + step).
      evaluate: whether the held-out loss is that of the average.
      export: whether the trained parameters of the final model, and of `RUN@STEP`, are those of the average.
    """

    decay: float = 0.999
    evaluate: bool = True
    export: bool = True

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1:
            raise InputError(f"decay = {self.decay} must lie between 0 and 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillSection:
    """A teacher from whose logits the model learns.

    The loss of a scored token is `weight` times the squared temperature times the divergence KL(teacher || model) of
    the softmaxes of logits over `temperature`, plus `1 - weight` times the usual loss. Auxiliary losses of routers are
    added as without a teacher.

    Attributes:
      teacher: a model, given as in `model.path`, with the same vocabulary. If there are pictures in the data, both
        process them in the same way and make as many tokens of them; with `data.feature_cache` the towers are the same.
        It is divided over the mesh as the trained model is, in the dtypes in which it is stored; it is not trained, and
        no checkpoint has it.
      weight: of the divergence, in (0, 1].
      temperature: divides the logits of both models in the divergence.
    """

    teacher: str
    weight: float = 1.0
    temperature: float = 1.0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1:
            raise InputError(f"weight = {shown(self.weight)} must lie in (0, 1]; leave out the section for 0")
        # Beyond, the squared temperature, or the difference of logits over it, exceeds the range of float32.
        if not 1e-3 <= self.temperature <= 1e3:
            raise InputError(f"temperature = {shown(self.temperature)} must lie in [0.001, 1000]; usual are 1 to 4")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPSection:
    """Layers behind the last one that predict tokens after the next, trained with the model (multi-token prediction).

    It is for models that were converted with `--further keep`, and trains these layers with all else. Without the
    section, or with `partition.train`, they are not trained unless a pattern names them: `further/.*`. Auxiliary losses
    of their routers are added as those of the model's own are.

    Attributes:
      weight: of the mean of these layers' losses in the loss (DeepSeek-V3, equation 25, where it is 0.3, and 0.1 for
        the last third of the tokens).
      depth: number of layers that are trained, the first ones. None: all that the model has.
    """

    weight: float = 0.3
    depth: int | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if not (is_finite(self.weight) and self.weight > 0):
            raise InputError(f"weight = {shown(self.weight)} must be above 0 and finite; leave out the section for 0")
        at_least(self, 1, "depth")

    def depth_of(self, further_layers: int) -> int:
        """Returns the number of layers that are trained; raises `InputError` if a model has fewer, or none."""
        depth = further_layers if self.depth is None else self.depth
        if not 0 < depth <= further_layers:
            raise InputError(
                f"mtp.depth = {self.depth or 'all'}: the model has further_layers={further_layers}, which predict "
                "tokens after the next; convert one that has some with --further keep"
            )
        return depth


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSection:
    """The number of steps and the batch size.

    Attributes:
      steps: optimizer steps.
      batch_size: sequences per step, over all devices.
      accumulation: number of microbatches into which a batch is split, to save memory. The result is the same, except
        that each microbatch draws its own noise (of `coder` routers). With auxiliary losses of routers, which depend on
        the loads of the whole batch, the model runs forward once more, about a third of the time of a step.
    """

    steps: int = 1000
    batch_size: int = 8
    accumulation: int = 1

    __repr__ = short_repr

    def __post_init__(self) -> None:
        at_least(self, 1, "steps", "batch_size", "accumulation")
        if self.batch_size % self.accumulation:
            raise InputError(f"batch_size = {self.batch_size} is not a multiple of accumulation = {self.accumulation}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSection:
    """Number of devices along each mesh axis; one of them may be -1, for all remaining devices.

    Attributes:
      data: devices that each have a share of the batch and all parameters.
      fsdp: devices that each have a share of the batch and of the parameters.
      expert: devices that each have a share of the experts, and of the batch.
      sequence: devices that each have a share of every sequence, and of the parameters; for sequences that are too long
        for one device. It needs microbatches of one sequence for each device along the first three axes.
      tensor: devices that each have a share of every kernel.
    """

    data: int = 1
    fsdp: int = -1
    expert: int = 1
    sequence: int = 1
    tensor: int = 1

    __repr__ = short_repr

    def __post_init__(self) -> None:
        at_least(self, -1, "data", "fsdp", "expert", "sequence", "tensor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """Checkpoints, from which an interrupted run goes on.

    Attributes:
      every: steps between checkpoints.
      keep: number of newest checkpoints that are kept.
    """

    every: int = 500
    keep: int = 2

    __repr__ = short_repr

    def __post_init__(self) -> None:
        at_least(self, 1, "every", "keep")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogSection:
    """The reports of a run. Metrics are written for every step.

    Attributes:
      every: steps between progress lines if there is no terminal.
      tensorboard: whether TensorBoard events are written beside metrics.jsonl (`pip install 'moe-jax[tensorboard]'`;
        without it a note says so).
      wandb: whether metrics are logged to Weights & Biases (`pip install 'moe-jax[wandb]'`), at once or into files of
        the run directory (the current one, if that is in a bucket) that `wandb sync` sends.
      wandb_project: the project there.
      profile_steps: `[first, last]`: the profiler traces these steps into `RUN/profile`, for TensorBoard or XProf.
      peak_flops: operations per second that a device can do, for `mfu`, the model's share of them. None: as its data
        sheet says; CPUs and devices that are not in `moe_jax.core.data_sheets` have none.
    """

    every: int = 10
    tensorboard: bool = True
    wandb: Literal["off", "online", "offline"] = "off"
    wandb_project: str = "moe-jax"
    profile_steps: tuple[int, ...] = ()
    peak_flops: float | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        at_least(self, 1, "every", "peak_flops")
        steps = self.profile_steps
        if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1] <= MAX_SIZE):
            raise InputError(f"profile_steps = {shown(list(steps))} must be [first, last], steps from 1 on")
        if not self.wandb_project:
            raise InputError("wandb_project is empty")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSection:
    """Held-out data, scored before the first step, every `every` steps and at the end, as by `moe-jax eval`.

    Attributes:
      text: a file or a glob pattern. A text file is scored as a whole; in JSON lines and tables, every document is
        scored by itself: in pairs the response, in conversations the assistant's messages.
      format, fields, chat, separator: as in `data.sources`.
      every: steps between evaluations.
      seq_len: as `data.seq_len`, which is the default. Inputs of an encoder have `data.input_len`.
      batch_size: number of windows or pairs computed at once.
    """

    text: str
    format: Format = "auto"
    fields: FieldsSection | None = None
    chat: bool = False
    separator: str | None = None
    every: int = 100
    seq_len: int | None = None
    batch_size: int = 8

    __repr__ = short_repr

    def __post_init__(self) -> None:
        at_least(self, 1, "every", "batch_size")
        at_least(self, 2, "seq_len")
        _ = self.source  # it has rules of its own

    @property
    def source(self) -> SourceSection:
        """The files, as a source of data."""
        return SourceSection(
            path=self.text, format=self.format, fields=self.fields, chat=self.chat, separator=self.separator
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run.

        >>> from moe_jax.training.recipe import ModelSection
        >>> moe_jax.Recipe(run_dir="run", model=ModelSection(path="moe-dir")).optimizer.learning_rate
        0.0003

    Attributes:
      run_dir: the directory that all outputs go to.
      seed: determines everything random.
    """

    run_dir: str
    model: ModelSection
    seed: int = 0
    data: DataSection = DataSection()
    partition: PartitionSection = PartitionSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    ema: EmaSection | None = None
    distill: DistillSection | None = None
    moe: MoESection = MoESection()
    mtp: MTPSection | None = None
    train: TrainSection = TrainSection()
    mesh: MeshSection = MeshSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
    eval: EvalSection | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed = {self.seed} must lie in [0, 2**32)")
        if not self.run_dir:
            raise InputError("run_dir is empty")
        model, data = self.model, self.data
        teacher = None if self.distill is None else self.distill.teacher
        held_out = None if self.eval is None else self.eval.text
        models = (model.path, model.base, teacher, self.run_dir, model.config)
        files = (data.tokenizer, data.chat_template, held_out, *(source.path for source in data.sources))
        for path in (*models, *files):
            if path is not None:
                check_model_path(path)

    def further_depth(self, further_layers: int) -> int:
        """Number of a model's `further_layers` that steps run: those of `mtp`, none without it; raises as it does."""
        return 0 if self.mtp is None else self.mtp.depth_of(further_layers)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe and applies `--set` overrides, which are validated like the rest.

    Args:
      path: a TOML file, or the name of a recipe that comes with the library, such as `upcycle_small`.
      overrides: each as `train.steps=100`.

    Raises:
      InputError: not TOML, unknown or misspelt keys, wrong types, bad values; all of them in one message.
      FileNotFoundError: neither such a file nor such a recipe.
    """
    path = recipe_toml.recipe_file(as_path(path))
    table = read_recipe_table(path)
    return json_toml.parse(Recipe, recipe_toml.apply_overrides(table, overrides), where=str(path), language="TOML")


def read_recipe_table(path: Path) -> dict[str, Any]:
    """Reads the keys of a recipe, unchecked.

    Raises:
      InputError: not TOML, or beyond the limits of `moe_jax.files.json_toml`.
      FileNotFoundError: no such file.
    """
    if not path.exists():
        raise FileNotFoundError(f"no recipe at {path}{recipe_toml.nearest_recipe(path)}")
    if path.is_dir():
        of_model = " of a model" if (path / "config.json").is_file() else ""
        raise InputError(f"{path} is a directory{of_model}, expected a recipe: a TOML file")
    return read_toml(path)
