"""Expert banks: everything the experts of a layer are made of, behind one interface."""

from moe_jax.experts.bank import ExpertBank as ExpertBank
from moe_jax.experts.config import BankConfig as BankConfig
from moe_jax.experts.config import FFNConfig as FFNConfig
from moe_jax.experts.full import FullBank as FullBank
from moe_jax.experts.make import make_bank as make_bank
from moe_jax.experts.shared_base import SharedBaseBank as SharedBaseBank
from moe_jax.experts.strategy import use_strategy as use_strategy
