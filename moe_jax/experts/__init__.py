"""Expert banks: everything the experts of a layer are made of, behind one interface."""

from moe_jax.experts.adapters import AdapterBank as AdapterBank
from moe_jax.experts.adapters import AdapterExperts as AdapterExperts
from moe_jax.experts.bank import ExpertBank as ExpertBank
from moe_jax.experts.bank import set_exchange as set_exchange
from moe_jax.experts.bank import set_strategy as set_strategy
from moe_jax.experts.bank_config import BankConfig as BankConfig
from moe_jax.experts.forms.base_codes import BaseCodes as BaseCodes
from moe_jax.experts.kernel_bank import KernelBank as KernelBank
from moe_jax.experts.kernel_bank import make_bank as make_bank
from moe_jax.experts.layout.config import AdapterConfig as AdapterConfig
from moe_jax.experts.layout.config import FFNConfig as FFNConfig
from moe_jax.experts.layout.config import LoRAConfig as LoRAConfig
from moe_jax.experts.mixed_bank import Mixed as Mixed
from moe_jax.experts.mixed_bank import MixedBank as MixedBank
