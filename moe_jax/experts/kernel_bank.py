"""The bank of experts that are kernels in any form; and `make_bank`, which makes a bank from its config."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moe_jax.core.errors import InputError, shown
from moe_jax.experts.bank import ExpertBank
from moe_jax.experts.bank_config import BankConfig
from moe_jax.experts.factored import factored_ffn
from moe_jax.experts.forms.kinds.lora import whole_form
from moe_jax.experts.forms.matrix import BASE, Load, Matrix, ffn_matrices
from moe_jax.experts.forms.optional.coding import CodedJointly, own_of
from moe_jax.experts.forms.protocol import KernelForm
from moe_jax.experts.hidden_rows import Kernels
from moe_jax.experts.layout.config import FFNConfig
from moe_jax.experts.linear import BIAS, ffn_linears, lora_for
from moe_jax.experts.parallel.over_mesh import apply_experts
from moe_jax.experts.strategy import choose_strategy
from moe_jax.experts.variables import Leaves
from moe_jax.functional.keys import fold_in
from moe_jax.functional.routing import Routing


class KernelBank(ExpertBank):
    """Experts with whole kernels, or with a base and a part of their own.

        >>> from flax import nnx
        >>> full = moe_jax.make_bank(moe_jax.BankConfig(), moe_jax.FFNConfig(dim=32), 4, 16, rngs=nnx.Rngs(0))
        >>> isinstance(full, moe_jax.KernelBank), full.num_parameters()
        (True, 6144)

    Whole kernels are `gate`, `up` [E, d, f] and `down` [E, f, d], in the form that NF4 and LoRA give them. Otherwise
    the leaves of the experts' own parts lie below `delta`, and `base` holds kernels [in, out] unless the config has no
    base. Such experts are applied in one of two exact ways, chosen by `experts.strategy`: *factored*, with the products
    of the base computed once per token; or *synthesised*, with every kernel made tile by tile inside the grouped
    product. Neither makes an array [E, in, out], forward or backward. A base that has LoRA or is one of NF4 kernels
    (`FFNConfig.nf4`) is always factored. One in codes of its own (`BankConfig.base_codes`) is made once for each
    synthesised product, and forgotten.
    """

    def __init__(
        self, config: BankConfig, expert: FFNConfig, num_experts: int, d_model: int, *, rngs: nnx.Rngs, dtype: jnp.dtype
    ):
        super().__init__(config, expert, num_experts)
        self._d_model = d_model
        if config.has_base:
            codes = None if config.base_codes is None else config.base_codes.form
            linears = ffn_linears(expert, d_model, bias=False, codes=codes, rngs=rngs, dtype=dtype)
            self.base = nnx.Dict({name: linear for name, linear in linears.items() if config.has_base_of(name)})
        stack = (num_experts,)
        fresh = {name: self._form(name).fresh(rngs, matrix, stack, dtype) for name, matrix in self._matrices.items()}
        own = self._own_form
        if own.over_base:
            delta = own.fresh_shared(expert, stack, dtype) if isinstance(own, CodedJointly) else {}
            delta |= {f"{name}/{path}": leaf for name, leaves in fresh.items() for path, leaf in leaves.items()}
            self.delta = Leaves(delta, own.is_trained)
            fresh = {name: {} for name in fresh}
        for name, leaves in fresh.items():
            if expert.bias:
                leaves[BIAS] = jnp.zeros((num_experts, self._matrices[name].shape[1]), dtype)
            if leaves:
                setattr(self, name, Leaves(leaves, self._form(name).is_trained))

    def __call__(self, x: Float[Array, "T d"], routing: Routing, key: Array | None = None) -> Float[Array, "T d"]:
        own = {name: Kernels(self._form(name), matrix, self._arrays(name)) for name, matrix in self._matrices.items()}
        return self._applied(x, routing, own, self.stacked_biases(), self._strategy_for(x, routing), key)

    def _strategy_for(self, x: Float[Array, "T d"], routing: Routing) -> str:
        if not self._own_form.over_base:
            return "synthesised"
        load = Load(self.num_experts, x.shape[0], routing.experts.shape[1])
        return choose_strategy(self.config, self.expert, x.shape[1], load, x.dtype.itemsize, self.strategy)

    def _applied(
        self,
        x: Float[Array, "T d"],
        routing: Routing,
        kernels: dict[str, Kernels],
        biases: dict[str, Float[Array, "E o"]],
        strategy: str,
        key: Array | None,
    ) -> Float[Array, "T d"]:
        """The weighted sum of the outputs of experts with these own kernels and biases, over the base."""
        activation = self.expert.activation
        if strategy == "synthesised":
            for name in filter(self.config.has_base_of, kernels):
                if self.config.base_codes is not None:
                    codes = self.config.base_codes.form.of_matrix(kernels[name].matrix)
                    kernels[name] = kernels[name].over(codes, self.base[name].arrays())
                else:
                    kernels[name].arrays[BASE] = self.base[name].materialise()
            return apply_experts(x, routing, kernels, biases, activation, self.exchange)
        bases = {name: self._base_product(name, fold_in(key, kernel.matrix.index)) for name, kernel in kernels.items()}
        return factored_ffn(x, routing, bases, kernels, biases, activation, strategy.removeprefix("factored-"))

    def kernels(self, expert: int) -> dict[str, Float[Array, "i o"]]:
        kernels = {}
        for name, matrix in self._matrices.items():
            base = self.base[name].materialise() if self.config.has_base_of(name) else None
            own = own_of(self._form(name), expert)
            kernels[name] = own.form.materialise(base, own.arrays(self._arrays(name)), matrix)
        return kernels

    @property
    def _matrices(self) -> dict[str, Matrix]:
        # Not an attribute: NNX hashes those.
        return ffn_matrices(self.expert, self._d_model)

    @property
    def _own_form(self) -> KernelForm:
        assert isinstance(self.config.form, KernelForm)
        return self.config.form

    def _form(self, name: str) -> KernelForm:
        """The form of the experts' own arrays. With a base, NF4 and LoRA belong to the base."""
        if self._own_form.over_base:
            return self._own_form.of_matrix(self._matrices[name])
        return whole_form(self.expert.nf4, lora_for(self.expert.lora, name))

    def _arrays(self, name: str) -> dict[str, Array]:
        """The arrays of one matrix of all experts."""
        if not self._own_form.over_base:
            return {path: array for path, array in getattr(self, name).arrays().items() if path != BIAS}
        form = self._form(name)
        every = self.delta.arrays()
        own = {path.removeprefix(f"{name}/"): array for path, array in every.items() if path.startswith(f"{name}/")}
        return form.combine(self._matrices[name], own, {path: every[path] for path in form.shared_leaves})

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
