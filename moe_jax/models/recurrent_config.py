"""Descriptions of layers that carry a state from token to token, in the place of attention."""

import abc
import dataclasses
import math
from typing import ClassVar, NamedTuple

from moe_jax.core.errors import InputError, check_number, check_positive
from moe_jax.core.formatting import short_repr
from moe_jax.experts.shapes import LoRAConfig


class Carried(NamedTuple):
    """Everything that a row carries from one token to the next through a layer, however long it is.

    Attributes:
      window: number of tokens before the present one that the short convolutions see; 0: there are none.
      channels: width of every short convolution.
      state: shape of the state, which is float32; None: there is none.
    """

    window: int
    channels: tuple[int, ...]
    state: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig(abc.ABC):
    """A branch of a layer that stands where attention does, and whose cache does not grow with the row.

    Every kind is a subclass: its numbers, its linear maps and what it carries. Its module is in `nn.recurrent`.

    Attributes:
      nf4: the kernels are kept as NF4 codes and frozen, but for those that `kept_whole` names.
      lora: beside the kernels of any of the `projections`.
    """

    nf4: bool = False
    lora: LoRAConfig | None = None

    mask: ClassVar[str] = "causal"
    relative_bias: ClassVar[None] = None
    kept_whole: ClassVar[tuple[str, ...]] = ()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.lora is not None:
            self.lora.check_targets(self.projections)

    @property
    @abc.abstractmethod
    def projections(self) -> tuple[str, ...]:
        """Names of the linear maps."""

    @property
    def biases(self) -> tuple[str, ...]:
        """Names of the linear maps that have a bias."""
        return ()

    @abc.abstractmethod
    def shapes(self, d_model: int) -> dict[str, tuple[int, int]]:
        """Returns the shapes [in, out] of the kernels of all projections, for activations of width `d_model`."""

    @property
    @abc.abstractmethod
    def carried(self) -> Carried:
        """Shapes of everything that a cache of the layer holds."""

    @property
    @abc.abstractmethod
    def num_splits(self) -> int:
        """The largest number of parts, each with heads of its own, that `tensor` may split the layer into."""

    @property
    @abc.abstractmethod
    def token_flops(self) -> int:
        """Floating-point operations that a token takes beside its projections, forward."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Returns the branch in words."""

    def _extra_words(self) -> list[str]:
        return ["NF4"] * self.nf4 + ([] if self.lora is None else [self.lora.describe()])


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaRuleConfig(RecurrentConfig):
    """The gated delta rule of one layer (Yang et al. 2024, arXiv:2412.06464; Qwen3-Next, Qwen3.5).

    Every head has a state, a matrix from keys to values. A token lets it decay, and replaces, by the share `beta`, what
    it returns for the token's key by the token's value; the query reads it. Before that, queries, keys and values pass
    a short causal convolution each; after it, the result of a head is normed and gated.

        >>> rule = moe_jax.DeltaRuleConfig(num_heads=4, num_key_heads=2, key_dim=8, value_dim=16)
        >>> rule.shapes(32)["v"], rule.carried.state
        ((32, 64), (4, 8, 16))

    Attributes:
      num_heads: heads H, each with a state, and with values, gate, share and decay of its own.
      num_key_heads: heads of queries and keys, a divisor of H; consecutive heads share one.
      key_dim: width of a head's queries and keys.
      value_dim: width of a head's values.
      conv_width: tokens that the convolutions see, the present one included.
      norm_eps: epsilon of the norm of a head's result.
    """

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4
    norm_eps: float = 1e-6

    # A few columns that decide how long everything is remembered.
    kept_whole: ClassVar[tuple[str, ...]] = ("beta", "decay")

    __repr__ = short_repr

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "num_heads", "num_key_heads", "key_dim", "value_dim", "conv_width")
        check_number(self, "norm_eps", at_least=0)
        if self.num_heads % self.num_key_heads:
            raise InputError(f"num_heads={self.num_heads} is not a multiple of num_key_heads={self.num_key_heads}")

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the linear maps."""
        return ("q", "k", "v", "gate", "beta", "decay", "o")

    def shapes(self, d_model: int) -> dict[str, tuple[int, int]]:
        """Returns the shapes [in, out] of the kernels of all projections, for activations of width `d_model`."""
        keys, values = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        widths = {"q": keys, "k": keys, "v": values, "gate": values, "beta": self.num_heads, "decay": self.num_heads}
        return {name: (d_model, width) for name, width in widths.items()} | {"o": (values, d_model)}

    @property
    def carried(self) -> Carried:
        """The cache holds the last inputs of the convolutions, and a matrix for each head."""
        keys, values = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        return Carried(self.conv_width - 1, (keys, keys, values), (self.num_heads, self.key_dim, self.value_dim))

    @property
    def num_splits(self) -> int:
        """The number of heads of keys, with each of which go the same number of states."""
        return self.num_key_heads

    @property
    def token_flops(self) -> int:
        """Operations of a token: its key reads a state, which is changed, its query reads it; and convolutions."""
        _, channels, state = self.carried
        assert state is not None
        return 6 * math.prod(state) + 2 * self.conv_width * sum(channels)

    def describe(self) -> str:
        """Returns the branch in words: `gated delta rule of 32 heads of 128 x 128, 16 of keys`."""
        words = [f"gated delta rule of {self.num_heads} heads of {self.key_dim} x {self.value_dim}"]
        words += [f"{self.num_key_heads} of keys"] * (self.num_key_heads != self.num_heads)
        return ", ".join([*words, *self._extra_words()])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortConvConfig(RecurrentConfig):
    """The gated short convolution of one layer (Liquid AI's LFM2; Transformers' `Lfm2ShortConv`).

    Three linear maps of a token give values and two gates. The values, times the first gate, pass a short causal
    convolution, each channel with itself; its result, times the second gate, goes through a last linear map.

        >>> convolution = moe_jax.ShortConvConfig(channels=32)
        >>> convolution.shapes(32)["v"], convolution.carried.window
        ((32, 32), 2)

    Attributes:
      channels: width of the values and of both gates.
      conv_width: tokens that the convolution sees, the present one included.
      bias: the linear maps and the convolution have biases.
    """

    channels: int
    conv_width: int = 3
    bias: bool = False

    __repr__ = short_repr

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "channels", "conv_width")

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the linear maps."""
        return ("in_gate", "out_gate", "v", "o")

    @property
    def biases(self) -> tuple[str, ...]:
        """Names of the linear maps that have a bias: all or none."""
        return self.projections if self.bias else ()

    def shapes(self, d_model: int) -> dict[str, tuple[int, int]]:
        """Returns the shapes [in, out] of the kernels of all projections, for activations of width `d_model`."""
        return {name: (d_model, self.channels) for name in self.projections[:-1]} | {"o": (self.channels, d_model)}

    @property
    def carried(self) -> Carried:
        """The content of a cache of the layer: the last inputs of the convolution."""
        return Carried(self.conv_width - 1, (self.channels,), None)

    @property
    def num_splits(self) -> int:
        """The number of channels, each of which is convolved by itself."""
        return self.channels

    @property
    def token_flops(self) -> int:
        """Operations of a token: the convolution, and two products with gates."""
        return (2 * self.conv_width + 2) * self.channels

    def describe(self) -> str:
        """Returns the branch in words: `gated short convolution of 2048 channels over 3 tokens`."""
        words = f"gated short convolution of {self.channels} channels over {self.conv_width} tokens"
        return ", ".join([words, *self._extra_words()])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Config(RecurrentConfig):
    """Mamba-2 of one layer (Dao and Gu 2024, arXiv:2405.21060; Transformers' `GraniteMoeHybridMambaLayer`).

    Every head has a state, a matrix from keys to values. A token lets it decay and adds its own to it, each by a step
    that it chooses, and its query reads it. Before that, values, keys and queries pass a short causal convolution;
    after it, the results are gated and normed.

        >>> mamba = moe_jax.Mamba2Config(num_heads=4, head_dim=16, num_groups=1, state_dim=8)
        >>> mamba.shapes(32)["k"], mamba.carried.state
        ((32, 8), (4, 8, 16))

    Attributes:
      num_heads: heads H, each with a state, and with values, gate and step of its own.
      head_dim: width of a head's values.
      num_groups: groups of consecutive heads that share queries and keys, and are normed together; a divisor of H.
      state_dim: width of queries and keys.
      conv_width: tokens that the convolutions see, the present one included.
      conv_bias: the convolutions have biases.
      bias: the linear maps have biases.
      least_step: the smallest step; a smaller one that a token chooses is raised to it.
      norm_eps: epsilon of the norm of the results.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_width: int = 4
    conv_bias: bool = True
    bias: bool = False
    least_step: float = 0.0
    norm_eps: float = 1e-6

    # A few columns that decide how long everything is remembered.
    kept_whole: ClassVar[tuple[str, ...]] = ("decay",)
    convolved: ClassVar[tuple[str, ...]] = ("v", "k", "q")

    __repr__ = short_repr

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "num_heads", "head_dim", "num_groups", "state_dim", "conv_width")
        check_number(self, "norm_eps", "least_step", at_least=0)
        if self.num_heads % self.num_groups:
            raise InputError(f"num_heads={self.num_heads} is not a multiple of num_groups={self.num_groups}")

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the linear maps."""
        return ("gate", "v", "k", "q", "decay", "o")

    @property
    def biases(self) -> tuple[str, ...]:
        """Names of the linear maps that have a bias: all or none."""
        return self.projections if self.bias else ()

    @property
    def widths(self) -> dict[str, int]:
        """Widths of a head of what is convolved."""
        return {"v": self.head_dim, "k": self.state_dim, "q": self.state_dim}

    def shapes(self, d_model: int) -> dict[str, tuple[int, int]]:
        """Returns the shapes [in, out] of the kernels of all projections, for activations of width `d_model`."""
        values, keys, _ = self.carried.channels
        widths = {"gate": values, "v": values, "k": keys, "q": keys, "decay": self.num_heads}
        return {name: (d_model, width) for name, width in widths.items()} | {"o": (values, d_model)}

    @property
    def carried(self) -> Carried:
        """The last inputs of the convolutions, and a matrix for each head."""
        values, keys = self.num_heads * self.head_dim, self.num_groups * self.state_dim
        return Carried(self.conv_width - 1, (values, keys, keys), (self.num_heads, self.state_dim, self.head_dim))

    @property
    def num_splits(self) -> int:
        """The number of heads."""
        return self.num_heads

    @property
    def token_flops(self) -> int:
        """Operations of a token: it is added to a state, its query reads it; and convolutions."""
        _, channels, state = self.carried
        assert state is not None
        return 4 * math.prod(state) + 2 * self.conv_width * sum(channels)

    def describe(self) -> str:
        """Returns the branch in words: `Mamba-2 of 48 heads of 128 x 64`."""
        words = [f"Mamba-2 of {self.num_heads} heads of {self.state_dim} x {self.head_dim}"]
        words += [f"{self.num_groups} groups"] * (self.num_groups > 1)
        return ", ".join([*words, *self._extra_words()])


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoAttentionConfig(RecurrentConfig):
    """Neither attention nor a recurrence, in a layer that has an FFN or an MoE alone (Nemotron-H)."""

    __repr__ = short_repr

    def __post_init__(self) -> None:
        super().__post_init__()
        # Said of all layers of a model; of this one it means nothing.
        object.__setattr__(self, "nf4", False)

    @property
    def projections(self) -> tuple[str, ...]:
        """There are none."""
        return ()

    def shapes(self, d_model: int) -> dict[str, tuple[int, int]]:
        """Returns an empty dict."""
        return {}

    @property
    def carried(self) -> Carried:
        """Nothing: the cache of the layer is empty."""
        return Carried(0, (), None)

    @property
    def num_splits(self) -> int:
        """0, which every number of parts divides."""
        return 0

    @property
    def token_flops(self) -> int:
        """0: there is nothing to compute."""
        return 0

    def describe(self) -> str:
        """Returns the branch in words: there is none."""
        return "no attention"


RECURRENT: dict[str, type[RecurrentConfig]] = {
    "delta_rule": DeltaRuleConfig,
    "short_conv": ShortConvConfig,
    "mamba2": Mamba2Config,
    "no_attention": NoAttentionConfig,
}
"""The kinds of recurrent layers, by the keys under which a model directory has their configs."""
