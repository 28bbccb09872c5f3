"""The steps from the features of an image encoder to the embeddings of a language model, and those of users' own."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from moe_jax.core.errors import InputError, shown
from moe_jax.core.registry import Registry
from moe_jax.distributed.own_rules import add_rules
from moe_jax.experts.linear import Linear
from moe_jax.experts.shapes import shapes_of
from moe_jax.kernels.plain import ACTIVATION_FUNCTIONS
from moe_jax.models.config import ModelConfig, VisionConfig
from moe_jax.nn.layers import Norm


class Given(NamedTuple):
    """The features and the model that a step of a projector is made for.

    Attributes:
      width: of the features that it takes.
      grid: rows and columns of patches that they belong to; None: they belong to no grid, as with a class token.
      d_model: width of the language model.
      argument: what follows the name of the step after a colon; empty: nothing.
      eps: epsilon of the tower's norms.
    """

    width: int
    grid: tuple[int, int] | None
    d_model: int
    argument: str
    eps: float


class LinearStep(Linear):
    """A linear map to the width of the language model; `linear:unbiased` has no bias."""

    def __init__(self, given: Given, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        if given.argument not in ("", "unbiased"):
            raise InputError(f"projector step 'linear:{given.argument}': expected 'linear' or 'linear:unbiased'")
        bias = not given.argument
        super().__init__((given.width, given.d_model), bias=bias, rngs=rngs, dtype=dtype)


class NormStep(Norm):
    """LayerNorm of every feature, with the tower's epsilon or, `norm:1e-05`, its own."""

    def __init__(self, given: Given, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        eps = _epsilon(given.argument) if given.argument else given.eps
        super().__init__("layer", given.width, eps, dtype=dtype)


class ActivationStep(nnx.Module):
    """An activation, entry by entry."""

    def __init__(self, name: str, given: Given, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        _no_argument(name, given)
        self.name = name

    def __call__(self, x: Float[Array, "B n w"]) -> Float[Array, "B n w"]:
        return ACTIVATION_FUNCTIONS[self.name](x)


class PoolStep(nnx.Module):
    """`pool:s`: the mean of every s x s patches."""

    def __init__(self, given: Given, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.grid, self.side = _divided_grid("pool", given)

    def __call__(self, x: Float[Array, "B n w"]) -> Float[Array, "B m w"]:
        return jnp.mean(_squares(x, self.grid, self.side), axis=2)


class PixelShuffleStep(nnx.Module):
    """`pixel_shuffle:s`: every s x s patches become one feature, their entries one after another, row by row."""

    def __init__(self, given: Given, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.grid, self.side = _divided_grid("pixel_shuffle", given)

    def __call__(self, x: Float[Array, "B n w"]) -> Float[Array, "B m ssw"]:
        squares = _squares(x, self.grid, self.side)
        return squares.reshape(*squares.shape[:2], -1)


def _epsilon(argument: str) -> float:
    try:
        eps = float(argument)
    except ValueError:
        eps = -1.0
    if not 0 < eps < 1:
        raise InputError(f"projector step {'norm:' + argument!r}: expected an epsilon between 0 and 1, norm:1e-05")
    return eps


def _no_argument(name: str, given: Given) -> None:
    if given.argument:
        raise InputError(f"projector step {name + ':' + given.argument!r}: {name!r} takes no argument")


def _divided_grid(name: str, given: Given) -> tuple[tuple[int, int], int]:
    side = int(given.argument) if given.argument.isdecimal() and len(given.argument) < 4 else 0
    if side < 1:
        raise InputError(f"projector step {name + ':' + given.argument!r}: expected the side of a square, {name}:2")
    if given.grid is None or any(length % side for length in given.grid):
        found = "no grid of patches" if given.grid is None else f"{given.grid[0]} x {given.grid[1]} patches"
        raise InputError(f"projector step '{name}:{side}': {found} cannot be cut into squares of {side} x {side}")
    return given.grid, side


def _squares(x: Float[Array, "B n w"], grid: tuple[int, int], side: int) -> Float[Array, "B m ss w"]:
    batch, _, width = x.shape
    rows, columns = grid[0] // side, grid[1] // side
    x = x.reshape(batch, rows, side, columns, side, width).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(batch, rows * columns, side * side, width)


def _activation(name: str) -> Callable[..., Any]:
    return lambda given, **more: ActivationStep(name, given, **more)


STEPS: Registry[Callable[..., Any]] = Registry(
    "projector step",
    {
        "linear": LinearStep,
        "norm": NormStep,
        "pool": PoolStep,
        "pixel_shuffle": PixelShuffleStep,
        **{name: _activation(name) for name in ACTIVATION_FUNCTIONS},
    },
)


def register_projector_step(name: str, make: Callable[..., Any], *, shardings: Mapping[str, P] | None = None) -> None:
    """Registers a step, for `VisionConfig.projector` to name.

        >>> from flax import nnx
        >>> class Halved(nnx.Module):
        ...     def __init__(self, given, *, rngs, dtype):
        ...         pass
        ...     def __call__(self, x):
        ...         return x[:, ::2]
        >>> moe_jax.nn.register_projector_step("my_lab.parts:Halved", Halved)

    Args:
      name: best the import path of the step; see `register_router`. It holds no further colon, which in a config
        stands before the argument of a step.
      make: `make(given, rngs=rngs, dtype=dtype)`, with what `Given` describes, returns a module that is called with
        features [B, n, w] and returns others, of another number and width perhaps.
      shardings: how its parameters are split over a mesh, by their paths below the step; see `register_router`.

    Raises:
      InputError: as `register_router`.
    """
    STEPS.check_new(name, make)
    add_rules(name, r"(.*/)?projector/\d+", {} if shardings is None else shardings)
    STEPS.register(name, make)


def make_projector(config: VisionConfig, d_model: int, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> list[Any]:
    """Makes the modules of a projector's steps, in turn.

    Raises:
      InputError: if a step is not known or does not fit what it is given, or the last one gives another width than that
        of the language model.
    """
    grid, (count, width) = _grid_of_features(config), shape_of_features(config)
    steps = []
    for spec in config.projector:
        name, argument = _parsed(spec)
        step = STEPS[name](Given(width, grid, d_model, argument, config.tower.norm_eps), rngs=rngs, dtype=dtype)
        steps.append(step)
        before, (count, width) = count, _shape_after(step, count, width)
        if count != before:
            side = getattr(step, "side", None)
            grid = None if grid is None or side is None else (grid[0] // side, grid[1] // side)
    if width != d_model:
        raise InputError(
            f"projector {', '.join(config.projector)}: its features have {width} entries, and the model takes {d_model}"
        )
    return steps


def tokens_per_picture(config: VisionConfig, d_model: int) -> int:
    """Returns the number of features that a picture becomes, each of which takes the place of a token."""
    shapes = projector_shapes(config, d_model)
    return shapes[-1][0] if shapes else shape_of_features(config)[0]


def vision_in_words(config: ModelConfig) -> str | None:
    """Returns tower, pictures and projector in a line; None: the model takes no pictures.

    >>> vision_in_words(moe_jax.tiny_model().config) is None
    True
    """
    vision = config.vision
    if vision is None:
        return None
    height, width = vision.processing.size
    features, tokens = ", ".join(map(str, vision.features)), tokens_per_picture(vision, config.d_model)
    return (
        f"{vision.family}: pictures of {height} x {width} pixels through {vision.tower.family}, "
        f"{vision.tower.num_layers} layers of width {vision.tower.d_model:,}, features {features}, and "
        f"{', '.join(vision.projector) or 'no projector'} become {tokens:,} tokens"
    )


def projector_shapes(config: VisionConfig, d_model: int) -> list[tuple[int, list[tuple[int, ...]]]]:
    """Returns of every step of a projector the number of features behind it, and the shapes of its parameters."""
    dtype = jnp.dtype("float32")
    steps = shapes_of(lambda rngs: nnx.List(make_projector(config, d_model, rngs=rngs, dtype=dtype)))
    (count, width), found = shape_of_features(config), []
    for step in steps:
        count, width = _shape_after(step, count, width)
        found.append((count, [leaf.shape for leaf in jax.tree.leaves(nnx.state(step))]))
    return found


def shape_of_features(config: VisionConfig) -> tuple[int, int]:
    """Returns the number and the width of a picture's features before the projector."""
    rows, columns = config.grid
    assert config.tower.patches is not None
    count = rows * columns + config.tower.patches.class_token - config.drop_first
    return count, config.tower.d_model * len(config.features)


def _grid_of_features(config: VisionConfig) -> tuple[int, int] | None:
    """Returns rows and columns of features; None: they are no grid, as with a class token or without one of them."""
    assert config.tower.patches is not None
    return config.grid if config.drop_first == int(config.tower.patches.class_token) else None


def _parsed(spec: str) -> tuple[str, str]:
    """Returns the name and the argument of a step; a name of a user's own has a colon itself."""
    if not isinstance(spec, str):
        raise InputError(f"projector step {shown(spec)}: expected the name of a step")
    if spec in STEPS:
        return spec, ""
    name, _, argument = spec.rpartition(":")
    if name not in STEPS:
        # `pool:2` has an argument, `my_lab.parts:Halved` a colon in its name.
        STEPS.check("projector step", spec if ":" in name or not name or argument.isidentifier() else name)
    return name, argument


def _shape_after(step: Any, count: int, width: int) -> tuple[int, int]:
    # As an argument, as the parameters of a step may be abstract.
    graphdef, state = nnx.split(step)
    x = jax.ShapeDtypeStruct((1, count, width), jnp.float32)
    return jax.eval_shape(lambda state, x: nnx.merge(graphdef, state)(x), state, x).shape[1:]


def grid_of_tokens(config: VisionConfig, d_model: int) -> tuple[int, int] | None:
    """Returns rows and columns of the tokens that a picture becomes; None: they are no grid."""
    grid, tokens = _grid_of_features(config), tokens_per_picture(config, d_model)
    if grid is None:
        return None
    side = round((grid[0] * grid[1] / tokens) ** 0.5)
    return (grid[0] // side, grid[1] // side) if side and grid[0] * grid[1] == tokens * side**2 else None
