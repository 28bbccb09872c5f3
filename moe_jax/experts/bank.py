"""Expert banks: modules that hold the experts of one layer and apply them; `make_bank` makes one from its config."""

import abc
import math
import operator
import re
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moe_jax.core.errors import InputError, shown
from moe_jax.experts.bank_config import BankConfig
from moe_jax.experts.exchange import Exchange, exchange_from_environment
from moe_jax.experts.factored import factored_ffn
from moe_jax.experts.forms.coding import CodedJointly, own_of
from moe_jax.experts.forms.protocol import KernelForm
from moe_jax.experts.forms.whole import Full, whole_form
from moe_jax.experts.hidden_rows import FFNs, Kernels
from moe_jax.experts.linear import BIAS, Leaves, ffn_linears, lora_for, of_one_layer
from moe_jax.experts.over_mesh import apply_experts
from moe_jax.experts.shapes import BASE, FFNConfig, Load, Matrix, ffn_matrices, shapes_of
from moe_jax.experts.strategy import check_strategy, choose_strategy, strategy_from_environment
from moe_jax.experts.summaries import Summarised, size_of
from moe_jax.functional.keys import fold_in
from moe_jax.functional.routing.token_choices import Routing, renumbered


class ExpertBank(Summarised, abc.ABC):
    """The experts of one layer. Code outside `experts/` never asks which form they have.

        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config, expert = moe_jax.BankConfig(kind="low-rank", rank=2), moe_jax.FFNConfig(dim=32)
        >>> bank = moe_jax.make_bank(config, expert, 4, 16, rngs=nnx.Rngs(0))
        >>> isinstance(bank, moe_jax.ExpertBank)
        True
        >>> routing, _ = moe_jax.route(jnp.zeros((5, 4)), 2, "topk_softmax")
        >>> bank(jnp.ones((5, 16)), routing).shape, bank.kernels(0)["up"].shape
        ((5, 16), (16, 32))

    Attributes:
      config: the form of the experts.
      expert: the shape of one expert.
      num_experts: E.
      strategy: how the bank is applied; one of `experts.strategy.STRATEGIES`.
      exchange: how tokens come to the experts over a mesh.
    """

    def __init__(self, config: BankConfig, expert: FFNConfig, num_experts: int, d_model: int):
        self._d_model = d_model
        self.config = config
        self.expert = expert
        self.num_experts = num_experts
        self.strategy = strategy_from_environment()
        self.exchange = exchange_from_environment()

    def _summary(self) -> list[str]:
        layers = "" if self.num_layers is None else f" in each of {self.num_layers} layers"
        experts = f"{self.num_experts} experts{layers}, {self.config.describe()}"
        return [f"{experts}; {self.expert.describe()}; width {self._d_model:,}", size_of(self)]

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "T d"], routing: Routing, key: Array | None = None) -> Float[Array, "T d"]:
        """The weighted sum of the outputs of the chosen experts, in the dtype of `x`.

        Args:
          x: tokens.
          routing: chosen experts and weights. An expert outside [0, E) contributes nothing.
          key: random key for dropout in training; None: no dropout.
        """

    def kernels(self, expert: int) -> dict[str, Float[Array, "i o"]]:
        """The kernels of one expert by name (`gate`, `up`, `down`), in the dtype of the base; LoRA is merged.

        Raises:
          InputError: if the experts are not FFNs, there is no such expert, or this is no bank of a single layer.
        """
        return self._kernels(self._checked(expert))

    @abc.abstractmethod
    def _kernels(self, expert: int) -> dict[str, Float[Array, "i o"]]:
        """As `kernels`, of an expert that there is."""

    def biases(self, expert: int) -> dict[str, Float[Array, " o"]]:
        """The biases of one expert by name; empty if the FFN has none. Raises `InputError` as `kernels` does."""
        expert = self._checked(expert)
        return {name: bias[expert] for name, bias in self.stacked_biases().items()}

    def own_leaves(self, expert: int) -> dict[str, tuple[nnx.Variable, int]]:
        """Returns the variables that hold what one expert has of its own, and its place in each, by path in the bank.

        The expert is taken to be there. In a bank of several layers, the axis of layers comes before the place.
        """
        found = {}
        for path, node in nnx.iter_graph(self):
            if isinstance(node, nnx.Variable) and path[0] != "base":
                place = self._place("/".join(map(str, path)), expert)
                if place is not None:
                    found["/".join(map(str, path))] = node, place
        return found

    def _place(self, path: str, expert: int) -> int | None:
        """Returns the place of an expert in a leaf that is not of the base; None: the leaf is not this expert's."""
        return expert

    @property
    def num_layers(self) -> int | None:
        """The number of layers whose experts are stacked in the bank, as in most models; None: it is one layer's."""
        options = self.config, self.expert, self.num_experts, self._d_model
        alone = nnx.state(shapes_of(lambda rngs: make_bank(*options, rngs=rngs)))
        first, expected = (jax.tree.leaves(state)[0].shape for state in (nnx.state(self), alone))
        return first[0] if len(first) > len(expected) else None

    def index_of(self, expert: int) -> int:
        """Returns the index of an expert; raises `InputError` if there is none."""
        try:
            index = operator.index(expert)
        except TypeError:
            raise InputError(f"expert {shown(expert)} is not the index of one: 0 to {self.num_experts - 1}") from None
        if not 0 <= index < self.num_experts:
            raise InputError(f"there is no expert {shown(expert)}; there are 0 to {self.num_experts - 1}")
        return index

    def _checked(self, expert: int) -> int:
        """Returns the index of an expert; raises `InputError` if there is none, or one in each of several layers."""
        index = self.index_of(expert)
        if (layers := self.num_layers) is not None:
            raise InputError(
                f"the experts of {layers} layers are stacked in this bank; take those of one layer, from "
                "decoder.layers[i].mlp.experts"
            )
        return index

    def stacked_biases(self) -> dict[str, Float[Array, "E o"]]:
        """The biases of all experts by name; empty if the FFN has none."""
        if not self.expert.bias:
            return {}
        return {name: getattr(self, name).bias[...] for name in self.expert.matrices}

    def frozen_leaves(self) -> re.Pattern[str]:
        """Matches the paths, below the bank, of parameters that the config freezes."""
        return re.compile("^base/(?!.*/lora/)" if not self.config.train_base else "^$")

    def num_parameters(self) -> int:
        """The number of parameters, of all layers in the bank; positions and codes are none (methods.md 8)."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(self, nnx.Param)))

    def num_bytes(self) -> int:
        """The bytes of all leaves, of all layers in the bank, positions and codes included."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(self)))


def set_strategy(model: nnx.Module, name: str) -> None:
    """Sets the strategy of a bank, or of every bank in a model.

    A graphdef that was split from the model before, and a step compiled for it, keep the strategy that they had.

    Args:
      model: changed in place.
      name: one of `experts.strategy.STRATEGIES`.

    Raises:
      InputError: for another name.
    """
    check_strategy(name, "strategy")
    for _, module in nnx.iter_modules(model):
        if isinstance(module, ExpertBank):
            module.strategy = name


def set_exchange(model: nnx.Module, text: str) -> None:
    """Sets how tokens come to experts over a mesh, in a bank or in every bank of a model.

    Args:
      model: changed in place.
      text: see `Exchange.parse`.

    Raises:
      InputError: for another text.
    """
    exchange = Exchange.parse(text, "exchange")
    for _, module in nnx.iter_modules(model):
        if isinstance(module, ExpertBank):
            module.exchange = exchange


class KernelBank(ExpertBank):
    """Experts with whole kernels, or with a base and a part of their own.

        >>> from flax import nnx
        >>> full = moe_jax.make_bank(moe_jax.BankConfig(), moe_jax.FFNConfig(dim=32), 4, 16, rngs=nnx.Rngs(0))
        >>> isinstance(full, moe_jax.KernelBank), full.num_parameters()
        (True, 6144)

    While a model generates, the experts of all its layers may lie in the arrays of a bank
    (`arrangements`): the leaf `places`, int32[E], then says which of these are the layer's own.

    Whole kernels are `gate`, `up` [E, d, f] and `down` [E, f, d], in the form that NF4 and LoRA give them. Otherwise
    the leaves of the experts' own parts lie below `delta`, and `base` holds kernels [in, out] unless the config has no
    base. Such experts are applied in one of two exact ways, chosen by `experts.strategy`: *factored*, with the products
    of the base computed once per token; or *synthesised*, with every kernel made tile by tile inside the grouped
    product. Neither makes an array [E, in, out], forward or backward. A base that has LoRA or is one of NF4 kernels
    (`FFNConfig.nf4`) is always factored. One in codes of its own (`BankConfig.base_codes`) is made once for each
    synthesised product, and forgotten.
    """

    places: nnx.Variable | None = None

    def __init__(
        self, config: BankConfig, expert: FFNConfig, num_experts: int, d_model: int, *, rngs: nnx.Rngs, dtype: jnp.dtype
    ):
        super().__init__(config, expert, num_experts, d_model)
        if config.has_base:
            codes = None if config.base_codes is None else config.base_codes.form
            linears = ffn_linears(expert, d_model, bias=False, codes=codes, rngs=rngs, dtype=dtype)
            self.base = nnx.Dict({name: linear for name, linear in linears.items() if config.has_base_of(name)})
        stack = (num_experts,)
        fresh = {name: self._form(name).fresh(rngs, matrix, stack, dtype) for name, matrix in self.matrices.items()}
        own = self._own_form
        if own.over_base:
            delta = own.fresh_shared(expert, stack, dtype) if isinstance(own, CodedJointly) else {}
            delta |= {f"{name}/{path}": leaf for name, leaves in fresh.items() for path, leaf in leaves.items()}
            self.delta = Leaves(delta, own.is_trained)
            fresh = {name: {} for name in fresh}
        for name, leaves in fresh.items():
            if expert.bias:
                leaves[BIAS] = jnp.zeros((num_experts, self.matrices[name].shape[1]), dtype)
            if leaves:
                setattr(self, name, Leaves(leaves, self._form(name).is_trained))

    def __call__(self, x: Float[Array, "T d"], routing: Routing, key: Array | None = None) -> Float[Array, "T d"]:
        own = {name: Kernels(self._form(name), matrix, self.arrays_of(name)) for name, matrix in self.matrices.items()}
        experts, strategy = FFNs(own, self.stacked_biases(), self.expert.activation), self._strategy_for(x, routing)
        if self.places is not None:
            routing, experts = self._among_all(routing, experts, strategy)
        return self._applied(x, routing, experts, strategy, key)

    def _among_all(self, routing: Routing, experts: FFNs, strategy: str) -> tuple[Routing, FFNs]:
        """Takes the experts of this layer to be among those of all layers; side by side, those of all would be used."""
        assert self.places is not None
        places = self.places[...]
        if strategy != "factored-side-by-side":
            return renumbered(routing, places), experts
        # Experts that can be side by side are so in every layer, with consecutive places.
        own = partial(of_one_layer, places=places)
        arrays = {
            name: {path: own(array) for path, array in kernel.arrays.items()}
            for name, kernel in experts.kernels.items()
        }
        return routing, experts.with_arrays(arrays, jax.tree.map(own, dict(experts.biases)))

    def _strategy_for(self, x: Float[Array, "T d"], routing: Routing) -> str:
        if not self._own_form.over_base:
            return "synthesised"
        load = Load(self.num_experts, x.shape[0], routing.experts.shape[1])
        return choose_strategy(self.config, self.expert, x.shape[1], load, x.dtype.itemsize, self.strategy)

    def _applied(
        self, x: Float[Array, "T d"], routing: Routing, experts: FFNs, strategy: str, key: Array | None
    ) -> Float[Array, "T d"]:
        """The weighted sum of the outputs of experts with these own kernels and biases, over the base."""
        kernels = dict(experts.kernels)
        if strategy == "synthesised":
            for name in filter(self.config.has_base_of, kernels):
                if self.config.base_codes is not None:
                    codes = self.config.base_codes.form.of_matrix(kernels[name].matrix)
                    kernels[name] = kernels[name].over(codes, self.base[name].arrays())
                else:
                    kernels[name].arrays[BASE] = self.base[name].operand()
            return apply_experts(x, routing, experts._replace(kernels=kernels), self.exchange)
        bases = {name: self._base_product(name, fold_in(key, kernel.matrix.index)) for name, kernel in kernels.items()}
        return factored_ffn(x, routing, bases, experts, strategy.removeprefix("factored-"))

    def _place(self, path: str, expert: int) -> int | None:
        name, _, leaf = path.removeprefix("delta/").partition("/")
        if name not in self.matrices or leaf == BIAS:
            return expert
        own = own_of(self._form(name), expert)
        is_own = leaf.startswith(own.folder) and leaf.removeprefix(own.folder) not in own.form.common_leaves
        return own.index if is_own else None

    def _kernels(self, expert: int) -> dict[str, Float[Array, "i o"]]:
        kernels = {}
        for name, matrix in self.matrices.items():
            base = self.base[name].materialise() if self.config.has_base_of(name) else None
            own = own_of(self._form(name), expert)
            kernels[name] = own.form.materialise(base, own.arrays(self.arrays_of(name)), matrix)
        return kernels

    @property
    def matrices(self) -> dict[str, Matrix]:
        """The matrices of an expert, by name."""
        # Not an attribute: NNX hashes those.
        return ffn_matrices(self.expert, self._d_model)

    @property
    def _own_form(self) -> KernelForm:
        assert isinstance(self.config.form, KernelForm)
        return self.config.form

    def _form(self, name: str) -> KernelForm:
        """The form of the experts' own arrays. With a base, NF4 and LoRA belong to the base."""
        if self._own_form.over_base:
            return self._own_form.of_matrix(self.matrices[name])
        given = None if isinstance(self._own_form, Full) else self._own_form
        return whole_form(self.expert.nf4, lora_for(self.expert.lora, name), given)

    def arrays_of(self, name: str) -> dict[str, Array]:
        """The arrays of one matrix of all experts."""
        if not self._own_form.over_base:
            return {path: array for path, array in getattr(self, name).arrays().items() if path != BIAS}
        form = self._form(name)
        every = self.delta.arrays()
        own = {path.removeprefix(f"{name}/"): array for path, array in every.items() if path.startswith(f"{name}/")}
        return form.combine(self.matrices[name], own, {path: every[path] for path in form.shared_leaves})

    def _base_product(self, name: str, key: Array | None) -> Callable[[Array], Array] | None:
        return partial(self.base[name], key=key) if self.config.has_base_of(name) else None


def make_bank(
    config: BankConfig,
    expert: FFNConfig,
    num_experts: int,
    d_model: int,
    *,
    rngs: nnx.Rngs,
    dtype: DTypeLike = jnp.float32,
) -> ExpertBank:
    """Makes a bank with initial parameters.

        >>> from flax import nnx
        >>> config, expert = moe_jax.BankConfig(kind="sparse", rate=0.75), moe_jax.FFNConfig(dim=32)
        >>> moe_jax.make_bank(config, expert, 4, 16, rngs=nnx.Rngs(0)).num_parameters()
        3072

    Args:
      config: the form of the experts.
      expert: the shape of one expert.
      num_experts: E.
      d_model: width of the model.
      rngs: random keys, stream `params`.
      dtype: dtype of the parameters.

    Raises:
      InputError: if a size is below 1, or the form does not fit experts of this shape, such as a rank above it.
    """
    for name, size in (("num_experts", num_experts), ("d_model", d_model)):
        if not isinstance(size, int) or size < 1:
            raise InputError(f"{name}={shown(size)} must be a positive integer")
    config.check_fits(expert, d_model)
    bank = config.form.bank or KernelBank
    return bank(config, expert, num_experts, d_model, rngs=rngs, dtype=jnp.dtype(dtype))
