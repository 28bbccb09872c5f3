"""Mixture-of-Experts layers, their routers, and what these report."""

import inspect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from moe_jax.core.errors import InputError, shown
from moe_jax.experts.adapters import Adapters
from moe_jax.experts.bank import make_bank
from moe_jax.experts.linear import Fixed, Leaves
from moe_jax.experts.shapes import LoRAConfig
from moe_jax.experts.summaries import Summarised, size_of
from moe_jax.functional import keys
from moe_jax.functional.array_shapes import check_shape
from moe_jax.functional.routing.gates import Selection
from moe_jax.functional.routing.route import route
from moe_jax.functional.routing.router_stats import RouterStats
from moe_jax.functional.routing.token_choices import NO_EXPERT, Routing, add_choice, weighted_inputs
from moe_jax.functional.routing.universal import add_noise, add_weighted, coder_logits, universal_weight
from moe_jax.models.config import ModelConfig
from moe_jax.models.moe_config import MoEConfig, PerftConfig
from moe_jax.models.own_parts import LINEAR, ROUTERS
from moe_jax.models.segments import Segment, segments_of, single_layers
from moe_jax.nn.inside import OFF, ChangeLogits, TokenRouting
from moe_jax.nn.layers import FFN, Linear, Norm


class LinearRouter(Linear):
    """Computes logits `x W`; kernel [d, E], perhaps with LoRA beside it.

    With `bias` it has one, [E], which is added to the logits and trained like the kernel. With `selection_bias` it has
    one to choose by, [E], float32, zero at first and trained by no gradient. With `weighs_universal` another kernel,
    `universal` [d, 1], computes the logit of a universal FFN's weight. With `norm_eps` its input is normalised by the
    RMSNorm `norm`, and divided by sqrt(d). With `expert_scales` it has `expert_scale` [E], factors of the weights.
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        *,
        lora: LoRAConfig | None = None,
        bias: bool = False,
        selection_bias: bool = False,
        weighs_universal: bool = False,
        norm_eps: float | None = None,
        expert_scales: bool = False,
        rngs: nnx.Rngs,
        dtype: jnp.dtype,
    ):
        super().__init__((d_model, num_experts), bias=bias, lora=lora, rngs=rngs, dtype=dtype)
        if selection_bias:
            self.selection_bias = Fixed(jnp.zeros(num_experts, jnp.float32))
        self.normed = norm_eps is not None
        if norm_eps is not None:
            self.norm = Norm("rms", d_model, norm_eps, dtype=dtype)
        if expert_scales:
            self.expert_scale = nnx.Param(jnp.ones(num_experts, dtype))
        if weighs_universal:
            self.universal = Linear((d_model, 1), rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "T d"], key: Array | None = None) -> Float[Array, "T E"]:
        """Returns logits, float32; the key is for LoRA's dropout in training."""
        x = x.astype(jnp.float32)
        if self.normed:
            x = self.norm(x) * jnp.float32(x.shape[-1] ** -0.5)
        with jax.default_matmul_precision("highest"):
            return super().__call__(x, key)

    def universal_logit(self, x: Float[Array, "T d"]) -> Float[Array, " T"]:
        """Returns the logit of the universal FFN's weight, float32."""
        with jax.default_matmul_precision("highest"):
            return self.universal(x.astype(jnp.float32))[:, 0]


class CoderRouter(nnx.Module):
    """The gate network of XFT (methods.md 2.4): `hidden` [d, E], tanh, `out` [E, E]; `noise` [d, E], zero at first."""

    def __init__(self, d_model: int, num_experts: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.hidden = Linear((d_model, num_experts), rngs=rngs, dtype=dtype)
        self.out = Linear((num_experts, num_experts), rngs=rngs, dtype=dtype)
        self.noise = Leaves({"kernel": jnp.zeros((d_model, num_experts), dtype)})

    def __call__(self, x: Float[Array, "T d"], key: Array | None = None) -> Float[Array, "T E"]:
        """Returns logits, float32; with a key, that is in training, noise of a learned size is added."""
        x = x.astype(jnp.float32)
        with jax.default_matmul_precision("highest"):
            logits = coder_logits(x, self.hidden.kernel[...], self.out.kernel[...])
            return logits if key is None else add_noise(logits, x, self.noise.arrays()["kernel"], key)


StackedStats = tuple[RouterStats, ...]
"""One entry per router of every MoE position of every segment, in order; its arrays are stacked over the repeats, of
which there is one in a model whose layers are not stacked. The router of a position's PEFT experts, if they have one,
comes after the MoE's.
"""


class RouterStatistics(NamedTuple):
    """Statistics of one router over all tokens of a text.

    Attributes:
      usage: share of the assignments that every expert got; float64, sums to 1.
      score: mean probability of every expert, over all tokens; float64, sums to 1.
      similarity: cosine between the logits of two experts over the tokens; float64.
    """

    usage: Float[np.ndarray, " E"]
    score: Float[np.ndarray, " E"]
    similarity: Float[np.ndarray, "E E"]


class RouterSums:
    """Accumulates the statistics of a router over batches; in float64, on the host."""

    def __init__(self) -> None:
        self._tokens = 0
        self._load, self._probability, self._gram = np.zeros(()), np.zeros(()), np.zeros(())

    def add(self, stats: RouterStats, tokens: int) -> None:
        """Adds the means of a batch, with the number of tokens that they are over."""
        self._tokens += tokens
        self._load = self._load + tokens * np.asarray(stats.load, np.float64)
        self._probability = self._probability + tokens * np.asarray(stats.probability, np.float64)
        self._gram = self._gram + tokens * np.asarray(stats.gram, np.float64)

    def statistics(self) -> RouterStatistics:
        """Returns the statistics over all batches."""
        norms = np.sqrt(np.outer(np.diag(self._gram), np.diag(self._gram)))
        # The cosine with logits that are always zero is undefined; such an expert counts as similar to no other.
        similarity = np.divide(self._gram, norms, out=np.zeros_like(norms), where=norms > 0)
        return RouterStatistics(self._load / self._tokens, self._probability / self._tokens, similarity)


def auxiliary_loss(config: ModelConfig, router: StackedStats) -> Float[Array, ""]:
    """Sums the routers' losses, each times its coefficient (methods.md 1): balance, z, cv, sequence balance; float32.

    Where the config says that the balance loss is that of the `model`, the MoEs' routers have one together; adapters'
    routers have their own.
    """
    return sum_of_losses(config.balance_over, _routers(config, len(router)), router)


def sum_of_losses(balance_over: str, positions: "Sequence[Router]", router: StackedStats) -> Float[Array, ""]:
    """Returns the sum of the losses of routers; see `auxiliary_loss`.

    Raises:
      InputError: if there are statistics of another number of routers.
    """
    if len(positions) != len(router):
        raise InputError(
            f"{len(router)} routers have reported, but the MoEs have {len(positions)}: a module in the place of an MoE "
            "returns the MoE's statistics and has its `config`, or returns () and has none"
        )
    if balance_over == "layer":
        return _weighted([position.coefficients for position in positions], router)
    alone = [
        position.coefficients if position.of_perft else (0.0, *position.coefficients[1:]) for position in positions
    ]
    return _weighted(alone, router) + _balance_of_model(positions, router)


def _balance_of_model(positions: Sequence["Router"], router: StackedStats) -> Float[Array, ""]:
    """Returns the balance loss of all layers together, with its coefficient.

    It is that of Transformers' `load_balancing_loss_func`: `E * sum_i F_i P_i`, where F_i is the mean number of tokens'
    counted assignments to expert i, which are k for each token, and P_i its mean probability, over all tokens and
    layers. Layers of other numbers of experts, or other coefficients, count by themselves, by their share of the
    layers.
    """
    groups: dict[tuple[int, int, float], list[RouterStats]] = {}
    for position, stats in zip(positions, router, strict=True):
        if not position.of_perft:
            kind = stats.load.shape[-1], position.balanced_choices, position.coefficients[0]
            groups.setdefault(kind, []).append(stats)
    num_layers = sum(len(position.layers) for position in positions if not position.of_perft)
    total = jnp.zeros((), jnp.float32)
    for (experts, choices, coefficient), members in groups.items():
        load, probability = (
            jnp.concatenate([getattr(stats, name) for stats in members]) for name in ("balanced_load", "probability")
        )
        balance = experts * choices * jnp.sum(jnp.mean(load, axis=0) * jnp.mean(probability, axis=0))
        total = total + coefficient * balance * (len(load) / num_layers)
    return total


def has_auxiliary_loss(config: ModelConfig) -> bool:
    """Whether any router of a model has an auxiliary loss."""
    return any(any(position.coefficients) for position in _routers(config))


def load_per_layer(config: ModelConfig, router: StackedStats) -> dict[int, Float[Array, " E"]]:
    """Returns the share of the assignments per expert, by layer index."""
    return {layer: stats.load for layer, stats in stats_per_layer(config, router).items()}


def stats_per_layer(
    config: ModelConfig,
    router: StackedStats,
    *,
    of_perft: bool = False,
    routers: Sequence["Router"] | None = None,
) -> dict[int, RouterStats]:
    """Returns the statistics of every MoE's router by layer index, or with `of_perft` of its PEFT experts' router.

    The arrays are unstacked, and may be NumPy's. `routers` are those of the model, if its layers were replaced.
    """
    per_layer = {}
    for position, stats in zip(_routers(config, len(router)) if routers is None else routers, router, strict=True):
        if position.of_perft == of_perft:
            for repeat, layer in enumerate(position.layers):
                per_layer[layer] = RouterStats(*(field[repeat] for field in stats))
    return dict(sorted(per_layer.items()))


class Router(NamedTuple):
    """A router, perhaps stacked over several layers, these layers, and how many experts it chooses for a token."""

    layers: list[int]
    of_perft: bool
    coefficients: "_Coefficients"
    balanced_choices: int
    top_k: int


_Coefficients = tuple[float, float, float, float]
"""Coefficients of the auxiliary losses of a router: balance, z, cv, balance within sequences."""


def _coefficients(moe: MoEConfig) -> list[_Coefficients]:
    """Returns the coefficients of every router of an MoE layer, in the order in which they report."""
    found = [(moe.balance_coef, moe.z_coef, moe.cv_coef, moe.sequence_balance_coef)]
    if moe.perft is not None and moe.perft.variant == "routed":
        found.append((moe.perft.balance_coef, moe.perft.z_coef, 0.0, 0.0))
    return found


def _weighted(coefficients: Sequence[_Coefficients], routers: Sequence[RouterStats]) -> Float[Array, ""]:
    total = jnp.zeros((), jnp.float32)
    for (balance, z, cv, within), stats in zip(coefficients, routers, strict=True):
        losses = balance * stats.balance + z * stats.z + cv * stats.cv + within * stats.sequence_balance
        total = total + jnp.sum(losses)
    return total


def _routers(config: ModelConfig, count: int | None = None) -> list[Router]:
    """Returns the routers of every MoE position of every segment, in the order in which they report.

    `count` is how many did: more than there are positions if the layers of the model are not stacked. None: they are.
    """
    stacked = _routers_of(segments_of(config.layers))
    return stacked if count in (None, len(stacked)) else _routers_of(single_layers(segments_of(config.layers)))


def _routers_of(segments: Sequence[Segment]) -> list[Router]:
    routers = []
    for segment in segments:
        for position, layer in enumerate(segment.pattern):
            if not isinstance(layer.mlp, MoEConfig):
                continue
            layers = [segment.layer(repeat, position) for repeat in range(segment.repeats)]
            routers += routers_of_layer(layer.mlp, layers)
    return routers


def routers_of_layer(moe: MoEConfig, layers: list[int]) -> list[Router]:
    """Returns the routers of an MoE that several layers have, in the order in which they report."""
    chosen = (moe.top_k, moe.perft_top_k)
    return [
        Router(layers, index > 0, found, moe.balanced_choices, chosen[index])
        for index, found in enumerate(_coefficients(moe))
    ]


class Perft(nnx.Module):
    """Adapters on the MoE's input, whose sum is added to the MoE's output.

    Adapters of the variant `routed` are weighted by a router of their own, which the gradient of the task reaches
    through these weights; those of `embedded` by the MoE's router; those of `dense` and `single` have no weights.
    """

    def __init__(self, config: PerftConfig, d_model: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.config = config
        if config.variant == "routed":
            self.router = LinearRouter(d_model, config.num_experts, rngs=rngs, dtype=dtype)
        self.adapters = Adapters(config.adapter, config.num_experts, d_model, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Float[Array, "T d"], moe: Routing, valid: Bool[Array, " T"] | None, key: Array | None
    ) -> tuple[Float[Array, "T d"], tuple[RouterStats, ...]]:
        """Returns the term that is added to the MoE's output, and the statistics of the adapters' own router, if any.

        Args:
          x: the MoE's input.
          moe: the decision of the MoE's router, in terms of the router's outputs.
          valid: tokens that are not padding; None: all.
          key: for dropout in training.
        """
        if self.config.variant == "embedded":
            return self.adapters(x, moe, key), ()
        if self.config.variant != "routed":
            return self.adapters(x, None, key), ()
        assert self.config.top_k is not None
        routing, stats = route(self.router(x), self.config.top_k, self.config.gate, valid=valid)
        return self.adapters(x, routing, key), (stats,)


_BRANCH_NORMS = ("experts_norm", "experts_output_norm", "universal_norm", "universal_output_norm")


class MoE(Summarised):
    """Routes every token to `top_k` experts of a bank, and to the universal FFN if there is one (methods.md 2.4).

    The universal FFN stands beside the bank, or with `extended` is the bank's last expert. With merged experts, the
    bank holds fewer experts than the router has outputs, and `groups` int32[E] has the expert of each output. PEFT
    experts add to the sum of all these (methods.md 7).

        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = moe_jax.MoEConfig(expert=moe_jax.FFNConfig(dim=32), num_experts=4, top_k=2)
        >>> moe = moe_jax.MoE(config, 16, rngs=nnx.Rngs(0))
        >>> y, stats = moe(jnp.ones((2, 5, 16)))
        >>> y.shape, float(moe.auxiliary_loss(stats)) > 0
        ((2, 5, 16), True)
    """

    def __init__(self, config: MoEConfig, d_model: int, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        """Makes a layer with fresh parameters.

        Args:
          config: of the layer.
          d_model: width of the activations.
          rngs: random keys, stream `params`.
          dtype: of the parameters.
        """
        dtype = jnp.dtype(dtype)
        self.config = config
        self.d_model = d_model
        # Typed so because it may be replaced by any function of the tokens (in a program, as `nnx.static(function)`).
        self.router: Any
        if config.router != LINEAR:
            make_router = ROUTERS[config.router]
            assert make_router is not None
            self.router = make_router(d_model, config.num_experts, rngs=rngs, dtype=dtype)
        elif config.universal == "coder":
            self.router = CoderRouter(d_model, config.num_experts, rngs=rngs, dtype=dtype)
        else:
            self.router = LinearRouter(
                d_model,
                config.num_experts,
                lora=config.router_lora,
                bias=config.router_bias,
                selection_bias=config.selection.bias,
                weighs_universal=config.universal == "sigmoid",
                norm_eps=config.branch_norm_eps,
                expert_scales=config.expert_scales,
                rngs=rngs,
                dtype=dtype,
            )
        self.experts = make_bank(config.bank, config.expert, config.bank_experts, d_model, rngs=rngs, dtype=dtype)
        if config.merged_experts is not None:
            # The expert of the bank for every output of the router.
            self.groups = Fixed(jnp.arange(config.num_experts, dtype=jnp.int32) % config.merged_experts)
        if config.universal_beside:
            self.universal = FFN(config.universal_ffn, d_model, rngs=rngs, dtype=dtype)
        if config.branch_norm_eps is not None:
            for name in _BRANCH_NORMS:
                setattr(self, name, Norm("rms", d_model, config.branch_norm_eps, dtype=dtype))
        if config.perft is not None:
            self.perft = Perft(config.perft, d_model, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Float[Array, "*B T d"], valid: Bool[Array, "*B T"] | None = None, key: Array | None = None
    ) -> tuple[Float[Array, "*B T d"], tuple[RouterStats, ...]]:
        """Applies the layer. Its output for a token depends only on the token's own sequence, and not on padding.

        Args:
          x: activations of any number of sequences.
          valid: tokens that are not padding, which goes to no expert and is in no statistic; None: all.
          key: the layer's random key in training; None: deterministic.

        Returns:
          The layer's output, and the statistics of its router and of the router of its PEFT experts, if they have one.

        Raises:
          InputError: if `x` is not of width `d_model`, or `valid` has not one entry for each token.
        """
        y, stats, _ = self.with_routing(x, valid, key)
        return y, stats

    def with_routing(
        self,
        x: Float[Array, "*B T d"],
        valid: Bool[Array, "*B T"] | None = None,
        key: Array | None = None,
        *,
        bias: Float[Array, " E"] | None = None,
        change: ChangeLogits | None = None,
        documents: Int[Array, "*B T"] | None = None,
    ) -> tuple[Float[Array, "*B T d"], tuple[RouterStats, ...], TokenRouting]:
        """Applies the layer, and also returns what its router decided.

        Arguments as in the call; `bias` is added to the router's logits, float32, and with `OFF` an expert is not
        chosen; where there are too few others, -1 stands in its place. `change` is a function of the logits after that,
        [*B, T, E], which returns those that are used. `documents` are those of packed rows, each of which is a sequence
        by itself for the balance within sequences.
        """
        check_shape("x", x, (..., None, self.d_model))
        if valid is not None:
            check_shape("valid", valid, x.shape[:-1])
        tokens = x.reshape(-1, x.shape[-1])
        valid = None if valid is None else valid.reshape(-1)
        logits, selection = self._logits(tokens, keys.fold_in(key, keys.ROUTER_NOISE)), self._selection()
        if bias is not None:
            check_shape("bias", bias, (self.config.num_experts,))
            logits = logits + bias[None, :]
            if selection.bias is not None:  # it could make up for a score of 0
                selection = selection._replace(bias=selection.bias + jnp.where(bias <= OFF / 2, OFF, 0.0))
        if change is not None:
            logits = change(logits.reshape(*x.shape[:-1], logits.shape[-1])).reshape(logits.shape)
        capacity = self._capacity(math.prod(x.shape[:-2]), key)
        routing, stats = route(
            logits,
            self.config.top_k,
            self.config.weighting,
            selection=selection,
            scale=self.config.gate_scale,
            valid=valid,
            **capacity,
            balance_choices=self.config.balance_choices,
            sequences=self._sequences(x.shape[:-1], documents),
        )
        if bias is not None:  # with too few other experts, one that is off was chosen
            is_off = jnp.take(bias, routing.experts, mode="clip") <= OFF / 2
            experts, weights = jnp.where(is_off, NO_EXPERT, routing.experts), jnp.where(is_off, 0.0, routing.weights)
            routing = routing._replace(experts=experts, weights=weights)
        if self.config.expert_scales:
            scales = self._of_router("expert_scale", "scale of every expert")[...].astype(jnp.float32)
            routing = routing._replace(weights=routing.weights * jnp.take(scales, routing.experts, mode="clip"))
        chosen = routing
        every = TokenRouting(*(array.reshape(*x.shape[:-1], array.shape[-1]) for array in (*routing, logits)))
        if self.config.merged_experts is not None:
            # Two choices may become the same expert: it is then applied with both weights.
            merged = jnp.take(self.groups[...], routing.experts, mode="clip")
            routing = routing._replace(experts=jnp.where(routing.experts == NO_EXPERT, NO_EXPERT, merged))
        if self.config.extended:
            weight = self._universal_weight(tokens, logits)
            routing = add_choice(routing, self.config.routed_experts, weight, valid)
        given = self._normed("experts_norm", tokens)
        if self.config.weighs_inputs:
            rows, of_rows = weighted_inputs(given, routing)
            y = self.experts(rows, of_rows, keys.fold_in(key, keys.EXPERTS))
            y = jnp.sum(y.reshape(len(tokens), self.config.top_k, -1), axis=1)
        else:
            y = self.experts(given, routing, keys.fold_in(key, keys.EXPERTS))
        y = self._normed("experts_output_norm", y)
        if self.config.universal_beside:
            universal = self.universal(self._normed("universal_norm", tokens), keys.fold_in(key, keys.FFN))
            universal = self._normed("universal_output_norm", universal)
            y = add_weighted(y, universal, self._universal_weight(tokens, logits))
        if self.config.perft is None:
            return y.reshape(x.shape), (stats,), every
        added, own_stats = self.perft(given, chosen, valid, keys.fold_in(key, keys.PERFT))
        return (y + added).reshape(x.shape), (stats, *own_stats), every

    def _normed(self, name: str, x: Float[Array, "T d"]) -> Float[Array, "T d"]:
        """Applies one of `_BRANCH_NORMS`, if the MoE has them."""
        return x if self.config.branch_norm_eps is None else getattr(self, name)(x)

    def _summary(self) -> list[str]:
        return [f"{self.config.describe().removeprefix('MoE of ')}; width {self.d_model:,}", size_of(self)]

    def auxiliary_loss(self, stats: tuple[RouterStats, ...]) -> Float[Array, ""]:
        """Returns the layer's term of the training loss (methods.md 1), float32; `stats` as the call returned them.

        Where every layer has a balance loss of its own: see `ModelConfig.balance_over`.
        """
        return _weighted(_coefficients(self.config), stats)

    def _logits(self, tokens: Float[Array, "T d"], key: Array | None) -> Float[Array, "T E"]:
        """Returns the router's logits, float32; a router that is the user's own may take no key."""
        called = self.router.__call__ if isinstance(self.router, nnx.Module) else self.router
        takes_key = "key" in inspect.signature(called).parameters
        logits = self.router(tokens, key=key) if takes_key else self.router(tokens)
        if not hasattr(logits, "shape"):
            raise InputError(f"the router's result is {shown(logits)}, expected logits for each token and expert")
        check_shape("the router's result", logits, (len(tokens), self.config.num_experts))
        return logits.astype(jnp.float32)

    def _capacity(self, rows: int, key: Array | None) -> dict[str, Any]:
        """Returns the arguments of `route` for so many rows."""
        factor, together = self.config.capacity_factor, self.config.capacity_rows
        if together is None:
            return {"capacity_factor": factor, "num_sequences": rows}
        if key is None:
            return {"num_sequences": rows}
        if rows % together:
            raise InputError(f"capacity_rows={together} does not divide the {rows} rows of a batch, or microbatch")
        return {"capacity_factor": factor, "num_sequences": rows // together, "pads_capacity": True}

    def _sequences(
        self, shape: tuple[int, ...], documents: Int[Array, "*B T"] | None
    ) -> int | Int[Array, "R n"] | None:
        """Returns the sequences that a balance loss is taken within; None: the layer has no such loss."""
        if not self.config.sequence_balance_coef:
            return None
        return math.prod(shape[:-1]) if documents is None else documents.reshape(-1, shape[-1])

    def _selection(self) -> Selection:
        given = self.config.selection
        bias = None
        if given.bias:
            # A checkpoint may hold the bias in another dtype.
            bias = self._of_router("selection_bias", "bias of selection")[...].astype(jnp.float32)
        return Selection(bias, given.groups, given.top_groups, given.group_score)

    def _universal_weight(self, tokens: Float[Array, "T d"], logits: Float[Array, "T E"]) -> Float[Array, " T"]:
        own = None
        if self.config.universal == "sigmoid":
            own = self._of_router("universal_logit", "universal FFN")(tokens)
        return universal_weight(logits, self.config.universal, own)

    def _of_router(self, name: str, what: str) -> Any:
        """Returns an attribute of the router; raises `InputError` if it is one that has no such attribute."""
        found = getattr(self.router, name, None)
        if found is None:
            raise InputError(f"the layer has a {what}, and its router, {type(self.router).__name__}, has no {name}")
        return found
