"""The parts of a run that need no weights: model, mesh, partition, optimizer and step.

`loop` runs the step, and `compile_only` compiles the same step for absent hardware.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.core.errors import InputError
from moe_jax.data.packing import check_room, stack_pairs
from moe_jax.data.pictures.picture_loading import picture_processing
from moe_jax.data.sections import input_length
from moe_jax.distributed.sharding import (
    batch_sharding,
    check_batch_divides,
    check_sequence_divides,
    make_mesh,
    path_name,
    state_shardings,
)
from moe_jax.experts import set_exchange
from moe_jax.model_io.frozen_tower import FrozenTower
from moe_jax.model_io.loading import FURTHER, TOWER, abstract_model, disk_paths, load_model, may_be_cast
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import ModelConfig
from moe_jax.nn import Decoder
from moe_jax.nn.inputs import Batch
from moe_jax.nn.projector import shape_of_features, tokens_per_picture
from moe_jax.peft import split_model, trainable_paths
from moe_jax.training.balance.selection_bias import is_selection_bias, moved_biases, without_biases
from moe_jax.training.flops import TowerUse
from moe_jax.training.optimizer import at_step, group_rates, learning_rate, make_optimizer
from moe_jax.training.recipe import Recipe
from moe_jax.training.step import FurtherTokens, StepMetrics, Teacher, make_step
from moe_jax.training.train_state import (
    TrainState,
    abstract_state,
    init_state,
    new_state,
    shardings_of,
    with_shardings,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A run without its weights and data.

    Attributes:
      config: of the model; its dtype is that of the trained parameters.
      model: the decoder with abstract parameters.
      trainable: paths in memory of the trained parameters, and of biases of selection that steps move.
      graphdef: of the model, for the states below.
      state: abstract `TrainState`, every leaf with its sharding.
      frozen: abstract state of the parameters that are not trained, with shardings. Its dtypes are the recipe's or the
        config's; a checkpoint's may differ.
      step: the jitted step `(state, frozen, batch) -> (state, metrics)`; run it under `jax.set_mesh(mesh)`. With a
        teacher, its parameters are a fourth argument.
      pictures: number of pictures in every row of a batch of `abstract_batch`.
      features: whether such a batch has features in place of pixels.
      teacher: None: nothing is distilled.
      taught: its abstract parameters, with shardings. Dtypes are its config's; a checkpoint's may differ.
    """

    config: ModelConfig
    mesh: Mesh
    model: Decoder
    trainable: frozenset[str]
    graphdef: nnx.GraphDef
    optimizer: optax.GradientTransformation
    state: TrainState
    frozen: nnx.State
    step: Callable[..., tuple[TrainState, StepMetrics]]
    pictures: int = 0
    features: bool = False
    teacher: Teacher | None = None
    taught: nnx.State | None = None

    @property
    def tower_use(self) -> TowerUse:
        """The use that a step makes of the tower of a model that sees."""
        trained = any(path.startswith(TOWER) for path in self.trainable)
        return "trained" if trained else "kept" if self.features else "frozen"

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The abstract arguments of the step after the batch."""
        return () if self.taught is None else (self.taught,)


def mesh_for(recipe: Recipe, config: ModelConfig, devices: list[Any] | None = None) -> Mesh:
    """Makes the mesh of a recipe for a model, without building the model; of all devices by default.

    Raises `InputError` if the model cannot be trained, or the mesh or the batch size do not fit.
    """
    config.check_scores_tokens("training")
    if recipe.data.input_len is not None and not config.has_encoder:
        raise InputError(f"data.input_len = {recipe.data.input_len} is for models with an encoder, which this has not")
    mesh = make_mesh(dataclasses.asdict(recipe.mesh), devices)
    check_batch_divides(mesh.shape, recipe.train.batch_size, recipe.train.accumulation)
    check_sequence_divides(mesh.shape, recipe.data.seq_len)
    config.check_whole_sequences(mesh.shape["sequence"])
    return mesh


def make_program(
    recipe: Recipe,
    config: ModelConfig,
    devices: list[Any] | None = None,
    *,
    pictures: int = 0,
    features: bool = False,
    teacher: ModelConfig | None = None,
) -> Program:
    """Makes the program of a recipe for a model.

    The mesh has all devices by default; they may be those of a topology description. For planning there are so many
    `pictures` in every row, or their `features`. `teacher` is the config of the model that the recipe's `distill`
    names, if it does.

    Raises:
      InputError: a mesh, batch size, partition, teacher or parameter shape that does not fit.
    """
    assert (teacher is None) == (recipe.distill is None), "the teacher is the recipe's"
    if teacher is not None:
        check_teacher(config, teacher)
    mesh = mesh_for(recipe, config, devices)
    frozen_dtype = recipe.model.frozen_dtype or config.dtype
    config = dataclasses.replace(recipe.moe.applied(config), dtype=recipe.model.param_dtype)
    model = _model(recipe, config, remat=recipe.model.remat)
    trainable = changed_paths(recipe, model)
    if features:
        check_tower_is_frozen(trainable)
    graphdef, params, frozen = split_model(model, trainable)
    optimizer = optimizer_of(recipe, model, trainable)
    # Scales of codes have a dtype of their own until they are trained.
    params = with_shardings(_cast(params, recipe.model.param_dtype), state_shardings(params, mesh))
    state = abstract_state(params, optimizer, ema=recipe.ema is not None)
    frozen = with_shardings(_cast(frozen, frozen_dtype), state_shardings(frozen, mesh))
    distilled, taught = (None, None) if teacher is None else _teacher(recipe, teacher, mesh)
    # A batch comes with its shardings, whatever is in it.
    shardings = (shardings_of(state), shardings_of(frozen), None, *(() if taught is None else (shardings_of(taught),)))
    replicated = NamedSharding(mesh, P())
    step = _make_step(recipe, config, graphdef, optimizer, distilled)
    step = jax.jit(
        step if teacher is None else _seeing_alike(step, recipe, config, teacher),
        donate_argnums=0,
        in_shardings=shardings,
        out_shardings=(shardings_of(state), replicated),
    )
    return Program(
        config=config,
        mesh=mesh,
        model=model,
        trainable=trainable,
        graphdef=graphdef,
        optimizer=optimizer,
        state=state,
        frozen=frozen,
        step=step,
        pictures=pictures,
        features=features,
        teacher=distilled,
        taught=taught,
    )


def changed_paths(recipe: Recipe, model: Decoder) -> frozenset[str]:
    """Returns the paths in memory of all that steps of a recipe change: trained parameters, and biases that move.

    Raises `InputError` as `trainable_paths` and `moved_biases` do.
    """
    partition = recipe.partition
    trained = trainable_paths(model, train=partition.train, freeze=partition.freeze)
    further = further_tokens(recipe, model.config)
    if further is not None and partition.train is None:
        layers = "|".join(map(str, range(further.depth)))
        trained |= trainable_paths(model, train=[f"{FURTHER}({layers})/.*"], freeze=partition.freeze)
    depth = 0 if further is None else further.depth
    return trained | moved_biases(model, recipe.moe.bias_update_rate, further=depth)


def check_tower_is_frozen(trainable: Collection[str]) -> None:
    """Raises `InputError` if, with features in place of pixels, any of these paths in memory is a tower's."""
    of_tower = sorted(path for path in trainable if path.startswith(TOWER))
    if of_tower:
        raise InputError(
            f"{of_tower[0]} is trained, and a batch has features, which do not change with it; give pixels, or leave "
            "the tower out of partition.train"
        )


def check_teacher(config: ModelConfig, teacher: ModelConfig) -> None:
    """Raises `InputError` unless a model can learn from the logits of another; the message says why in one line."""
    if config.has_encoder or teacher.has_encoder:
        which = "distill.teacher" if teacher.has_encoder else "the model"
        raise InputError(f"distill is for models without an encoder, and {which} has one")
    teacher.check_scores_tokens("a teacher")
    if (teacher.vocab_size, teacher.num_outputs) != (config.vocab_size, config.num_outputs):
        raise InputError(
            f"distill.teacher has a vocabulary of {teacher.num_outputs:,} tokens, the model one of "
            f"{config.num_outputs:,}; a teacher needs the same vocabulary"
        )


def _seeing_alike(
    step: Callable[..., tuple[TrainState, StepMetrics]], recipe: Recipe, config: ModelConfig, teacher: ModelConfig
) -> Callable[..., tuple[TrainState, StepMetrics]]:
    """Returns a step that refuses batches with pictures, when it is traced, which the teacher would see otherwise."""

    @functools.wraps(step)
    def checked(state: TrainState, frozen: nnx.State, batch: Batch, taught: nnx.State) -> Any:
        if not {"pixels", "features"}.isdisjoint(batch):
            check_pictures_of_teacher(recipe, config, teacher, features="features" in batch)
        return step(state, frozen, batch, taught)

    return checked


def check_pictures_of_teacher(recipe: Recipe, config: ModelConfig, teacher: ModelConfig, *, features: bool) -> None:
    """Raises `InputError` unless a teacher sees the pictures of a model's batches as it would see them by itself.

    Pixels are normalised by each model in its own way; `features` in their place have that of the model in them. The
    weights of towers are not compared here (`FrozenTower.is_of`).
    """
    if config.vision is None or teacher.vision is None:  # a batch without pictures goes well with both
        return
    counts = [tokens_per_picture(one.vision, one.d_model) for one in (teacher, config) if one.vision is not None]
    if counts[0] != counts[1]:
        raise InputError(
            f"distill.teacher makes {counts[0]:,} tokens of a picture, the model {counts[1]:,}; a teacher needs as many"
        )
    theirs, ours = teacher.vision.processing, picture_processing(recipe.data, config)
    names = ["size", "shortest", "pad", "resample"]
    names += ["rescale", "mean", "std"] if features else ["mean"] if ours.pad else []  # what is padded has the mean
    for name in names:
        if getattr(theirs, name) != getattr(ours, name):
            raise InputError(
                f"distill.teacher takes pictures with {name} = {getattr(theirs, name)}, and the model is given them "
                f"with {name} = {getattr(ours, name)}"
                f"{' (data.image_aspect)' if name == 'pad' and recipe.data.image_aspect else ''}; a teacher needs the "
                "same pictures"
            )


def check_tower_of_teacher(tower: FrozenTower, teacher: ModelSource) -> None:
    """Raises `InputError` if a teacher that sees has another tower than the one whose features are in its batches."""
    if teacher.config.vision is not None and not tower.is_of(teacher):
        raise InputError(
            "features of pictures are made by the model's tower, and distill.teacher has another tower; give pixels "
            "(no data.feature_cache), so that each looks at the pictures itself"
        )


def _model(recipe: Recipe, config: ModelConfig, **how: Any) -> Decoder:
    model = abstract_model(config, compute_dtype=recipe.model.compute_dtype, **how)
    if recipe.model.exchange is not None:
        set_exchange(model, recipe.model.exchange)
    return model


def _teacher(recipe: Recipe, config: ModelConfig, mesh: Mesh) -> tuple[Teacher, nnx.State]:
    section = recipe.distill
    assert section is not None
    graphdef, state = nnx.split(_model(recipe, config))
    state = with_shardings(state, state_shardings(state, mesh))
    return Teacher(graphdef, section.weight, section.temperature), state


def load_teacher(program: Program, source: ModelSource) -> nnx.State:
    """Loads the parameters of a program's teacher, on the mesh, in the dtypes in which they are stored.

    Raises `InputError` if the source is incomplete, or its weights are not finite.
    """
    with jax.set_mesh(program.mesh):
        return nnx.state(load_model(source, mesh=program.mesh, finite=True))


def metrics_of(recipe: Recipe, program: Program, change: Callable[[Decoder], None]) -> Callable[..., StepMetrics]:
    """Returns a jitted function: the metrics of a program's step with a changed model; no update, no donation.

    `change` changes the model that it is given, but no parameter. A teacher stays as it is.
    """
    model = nnx.clone(program.model)
    change(model)
    graphdef, *_ = split_model(model, program.trainable)
    step = _make_step(recipe, program.config, graphdef, program.optimizer, program.teacher)
    return jax.jit(lambda *arguments: step(*arguments)[1])


def _make_step(
    recipe: Recipe,
    config: ModelConfig,
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    teacher: Teacher | None,
) -> Callable[..., tuple[TrainState, StepMetrics]]:
    ema_decay = None if recipe.ema is None else recipe.ema.decay
    options = {"seed": recipe.seed, "accumulation": recipe.train.accumulation, "ema_decay": ema_decay}
    options |= {"bias_update_rate": recipe.moe.bias_update_rate, "further": further_tokens(recipe, config)}
    return make_step(graphdef, optimizer, schedule_of(recipe), teacher=teacher, **options)


def further_tokens(recipe: Recipe, config: ModelConfig) -> FurtherTokens | None:
    """Returns the loss that a recipe's `mtp` asks for; raises `InputError` if the model lacks layers for it."""
    section = recipe.mtp
    return None if section is None else FurtherTokens(section.weight, section.depth_of(config.further_layers))


def schedule_of(recipe: Recipe) -> optax.Schedule:
    """Returns the learning rate of a recipe by number of steps done, float32."""
    return learning_rate(recipe.optimizer, recipe.schedule, recipe.schedule.steps or recipe.train.steps)


def optimizer_of(recipe: Recipe, model: Decoder, trainable: Collection[str]) -> optax.GradientTransformation:
    """Makes the optimizer of a recipe, with its schedule, clipping, and rates of groups.

    It is for states of the trained parameters alone, in any dtype, and for gradients of `make_step`.

    Args:
      recipe: its `optimizer` and `schedule` count, and `train.steps`.
      model: the model, which may be abstract.
      trainable: paths in memory of the trained parameters, as `peft.trainable_paths` returns them.

    Raises:
      InputError: for a pattern of a group that matches no trained parameter.
    """
    rates = None
    if recipe.optimizer.groups:
        learnt = sorted(path for path in trainable if not is_selection_bias(path))
        leaves = {path: disk_paths(model.config, path, model=model) for path in learnt}
        rates = group_rates(recipe.optimizer, leaves)
    return make_optimizer(recipe.optimizer, schedule_of(recipe), rates)


def abstract_batch(
    recipe: Recipe, config: ModelConfig, mesh: Mesh, *, pictures: int = 0, features: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes, dtypes and shardings of a recipe's batch for a model, with so many pictures in every row.

    They are pixels, or `features` in their place.

    Raises:
      InputError: for pictures of a model that takes none, or more of them than go into a row.
    """
    rows, seq_len = recipe.train.batch_size, recipe.data.seq_len
    input_len = input_length(recipe.data) if config.has_encoder else None
    # One row, for a plan may be of batches that this machine has no memory for.
    like = stack_pairs([], 1, input_len=input_len, seq_len=seq_len)
    batch = {
        name: jax.ShapeDtypeStruct((rows, *array.shape[1:]), array.dtype, sharding=batch_sharding(mesh, array.shape[1]))
        for name, array in like.items()
    }
    if pictures:
        vision = config.check_sees("pictures")
        check_room(pictures, tokens_per_picture(vision, config.d_model), seq_len)
        name, dtype = ("features", recipe.model.compute_dtype) if features else ("pixels", "uint8")
        sizes = shape_of_features(vision) if features else (*vision.processing.size, 3)
        batch[name] = jax.ShapeDtypeStruct((rows, pictures, *sizes), dtype, sharding=batch_sharding(mesh, 1))
        batch["slots"] = batch["tokens"]
    return batch


def initial_states(program: Program, recipe: Recipe, source: ModelSource | None) -> tuple[nnx.State, nnx.State]:
    """Returns the parameters before the first step, `(trained, frozen)`: from the source, or drawn with the seed.

    Raises `InputError` if the source is incomplete, or its weights are not finite or too large for the recipe's dtypes.
    """
    if recipe.model.init == "checkpoint":
        assert source is not None

        def param_dtype(path: str) -> str | None:
            return recipe.model.param_dtype if path in program.trainable else recipe.model.frozen_dtype

        loaded = load_model(source, param_dtype=param_dtype, mesh=program.mesh, finite=True)
        _, params, frozen = split_model(loaded, program.trainable)
        params, biases = without_biases(params)
        # A checkpoint may hold a bias in another dtype, in which steps of this size would be lost.
        return nnx.merge_state(params, jax.tree.map(lambda bias: bias.astype(jnp.float32), biases)), frozen

    def draw() -> tuple[nnx.State, nnx.State]:
        model = Decoder(program.config, rngs=nnx.Rngs(recipe.seed))
        _, params, frozen = split_model(model, program.trainable)
        drawn, likes = (params, frozen), (program.state.params, program.frozen)
        return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), drawn, likes)

    shardings = (shardings_of(program.state.params), shardings_of(program.frozen))
    return jax.jit(draw, out_shardings=shardings)()


def initial_model(recipe: Recipe, config: ModelConfig, source: ModelSource | None) -> Decoder:
    """Returns the model before the first step, on the recipe's mesh, in its dtypes; raises as `initial_states`."""
    program = make_program(dataclasses.replace(recipe, distill=None), config)
    with jax.set_mesh(program.mesh):
        return nnx.merge(program.graphdef, *initial_states(program, recipe, source))


def draw_model(config: ModelConfig, seed: int) -> Decoder:
    """Draws the new weights of `initial_states`, on one device."""
    state = jax.jit(lambda: nnx.state(Decoder(config, rngs=nnx.Rngs(seed))))()
    return nnx.merge(nnx.graphdef(abstract_model(config)), state)


def first_state(program: Program, params: nnx.State) -> TrainState:
    """Returns the state before the first step, which holds `params` themselves: the step donates them."""
    params = jax.device_put(params, shardings_of(program.state.params))
    return init_state(params, program.optimizer, ema=program.state.ema is not None)


def completed_state(program: Program, state: TrainState) -> TrainState:
    """Adds the missing parts of a program's state to a state, whose buffers are donated.

    Without an optimizer's state, the optimizer begins as before its first gradient, with the learning rate of the step;
    a missing average begins with the parameters.
    """

    def make(state: TrainState) -> TrainState:
        new = new_state(state.params, program.optimizer, ema=program.state.ema is not None)
        if state.opt_state == ():
            state = state._replace(opt_state=at_step(new.opt_state, state.step))
        return state._replace(ema=new.ema) if state.ema is None else state

    return jax.jit(make, donate_argnums=0, out_shardings=shardings_of(program.state))(state)


def _cast(state: nnx.State, dtype: str) -> nnx.State:
    """Casts an abstract state to another dtype, except for leaves that may not be cast."""

    def cast(path: tuple, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, dtype if may_be_cast(path_name(path), leaf.dtype) else leaf.dtype)

    return jax.tree_util.tree_map_with_path(cast, state)
