"""The methods that ResMoE is compared with, all at the same kept share (METHODS 5)."""

from moe_jax.compress.baselines.git_rebasin import GitReBasin as GitReBasin
from moe_jax.compress.baselines.meo import MEO as MEO
from moe_jax.compress.baselines.mlp_fusion import MLPFusion as MLPFusion
from moe_jax.compress.baselines.msmoe import MSMoE as MSMoE
from moe_jax.compress.baselines.plain_quantize import PlainQuantize as PlainQuantize
from moe_jax.compress.baselines.sp import StructuredPruning as StructuredPruning
from moe_jax.compress.baselines.svd import SVD as SVD
from moe_jax.compress.baselines.up import UnstructuredPruning as UnstructuredPruning
