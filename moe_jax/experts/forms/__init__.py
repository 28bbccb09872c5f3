"""Forms of experts, each found by its name: full kernels, or a shared base and something small per expert."""

from moe_jax.experts.forms.low_rank import JointLowRank as JointLowRank
from moe_jax.experts.forms.low_rank import LowRank as LowRank
from moe_jax.experts.forms.mixture_of_bases import MixtureOfBases as MixtureOfBases
from moe_jax.experts.forms.protocol import ExpertForm as ExpertForm
from moe_jax.experts.forms.protocol import KernelForm as KernelForm
from moe_jax.experts.forms.protocol import register as register
from moe_jax.experts.forms.quantized import Quantized as Quantized
from moe_jax.experts.forms.sparse import Sparse as Sparse
from moe_jax.experts.forms.whole import Full as Full
from moe_jax.experts.shapes import Matrix as Matrix
from moe_jax.experts.shapes import Window as Window
from moe_jax.experts.shapes import ffn_matrices as ffn_matrices
