"""Banks of experts: all experts of a layer behind one interface, and the forms that they may have.

`make_bank` makes a bank from a `BankConfig`, whose form is one of those here or one that `register` has added. A
bank is an NNX module that is called with the tokens and a routing.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from moe_jax.experts import BankConfig, FFNConfig, LowRank, make_bank
    >>> bank = make_bank(BankConfig(LowRank(rank=2)), FFNConfig(dim=32), 4, 16, rngs=nnx.Rngs(0))
    >>> routing, _ = moe_jax.route(jnp.zeros((3, 4)), 2, "topk_softmax")
    >>> bank(jnp.ones((3, 16)), routing).shape
    (3, 16)

Banks:
    make_bank                        makes one from its config
    ExpertBank                       what all have in common
    KernelBank                       whole kernels, or a base and something of every expert's own
    MixedBank                        experts in codes of different bits
    AdapterBank                      adapters after a shared FFN
    set_strategy, set_exchange       how experts are applied, and how tokens come to them over a mesh
    Leaves                           a module that holds arrays by their paths

Configs:
    BankConfig, BaseCodes            the form of the experts, and codes of the base
    FFNConfig                        the shape of one expert
    AdapterConfig, LoRAConfig        of adapters, and of LoRA

Forms:
    Full                             whole kernels
    LowRank, JointLowRank            products of two factors, for each matrix or for all together
    Sparse                           few entries
    Quantized, Mixed                 codes of few bits, of the same or of different ones
    MixtureOfBases                   mixtures of common factors
    AdapterExperts                   adapters
    ExpertForm, KernelForm           what a form of your own is derived from
    register                         gives it a name
    forms                            the types that its methods meet, in a namespace of their own
"""

from moe_jax.core.signatures import show_signatures as _show_signatures
from moe_jax.experts import forms as forms
from moe_jax.experts.adapters import AdapterBank as AdapterBank
from moe_jax.experts.adapters import AdapterExperts as AdapterExperts
from moe_jax.experts.bank import ExpertBank as ExpertBank
from moe_jax.experts.bank import KernelBank as KernelBank
from moe_jax.experts.bank import make_bank as make_bank
from moe_jax.experts.bank import set_exchange as set_exchange
from moe_jax.experts.bank import set_strategy as set_strategy
from moe_jax.experts.bank_config import BankConfig as BankConfig
from moe_jax.experts.bank_config import BaseCodes as BaseCodes
from moe_jax.experts.forms import ExpertForm as ExpertForm
from moe_jax.experts.forms import Full as Full
from moe_jax.experts.forms import JointLowRank as JointLowRank
from moe_jax.experts.forms import KernelForm as KernelForm
from moe_jax.experts.forms import LowRank as LowRank
from moe_jax.experts.forms import MixtureOfBases as MixtureOfBases
from moe_jax.experts.forms import Quantized as Quantized
from moe_jax.experts.forms import Sparse as Sparse
from moe_jax.experts.forms import register as register
from moe_jax.experts.linear import Leaves as Leaves
from moe_jax.experts.mixed_bank import Mixed as Mixed
from moe_jax.experts.mixed_bank import MixedBank as MixedBank
from moe_jax.experts.shapes import AdapterConfig as AdapterConfig
from moe_jax.experts.shapes import FFNConfig as FFNConfig
from moe_jax.experts.shapes import LoRAConfig as LoRAConfig

_show_signatures(ExpertBank, KernelBank, MixedBank, AdapterBank, Leaves)
