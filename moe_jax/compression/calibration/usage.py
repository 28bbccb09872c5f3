"""Usage of the experts: measured on a text, or derived from the weights of the router (methods.md 5)."""

import numpy as np

from moe_jax.compression.source_layer import SourceLayer
from moe_jax.nn.moe import RouterStatistics


def statistics_of(layer: SourceLayer) -> RouterStatistics:
    """Returns statistics of the router for the experts in the bank: measured on a text, or derived from its weights.

    Without a text all experts count as used alike, and are as similar as the columns of the router's (last) matrix.

    Raises:
      InputError: if the router has weights that are not finite, or too large.
    """
    known = None if layer.calibration is None else layer.calibration.statistics
    if known is None:
        matrix = layer.leaf("router/out/kernel" if layer.moe.universal == "coder" else "router/kernel")
        columns = matrix.astype(np.float64)
        norms = np.linalg.norm(columns, axis=0)
        products = np.outer(norms, norms)
        similarity = np.divide(columns.T @ columns, products, out=np.zeros_like(products), where=products > 0)
        uniform = np.full(len(norms), 1 / len(norms))
        known = RouterStatistics(uniform, uniform, similarity)
    if layer.moe.merged_experts is None:
        return known
    # For merged experts: what goes to one of them is added up.
    member = np.eye(layer.moe.merged_experts)[layer.leaf("groups")]
    share = member / member.sum(axis=0)
    return RouterStatistics(known.usage @ member, known.score @ member, share.T @ known.similarity @ share)
