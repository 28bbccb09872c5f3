"""The balance loss within sequences, by hand from DeepSeek-V3's equations 17 to 20, of rows and of packed documents."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.functional.routing.route import route
from moe_jax.functional.routing.router_stats import means_of, sums_of
from tests.support.tiers import long

EXPERTS, TOP_K = 5, 2
LOGITS = np.random.default_rng(0).normal(size=(3, 8, EXPERTS)).astype(np.float32)
# Documents of every row; 0 is padding.
DOCUMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 0, 0], [1, 2, 3, 3, 3, 3, 0, 0]])


def of_sequence(scores: np.ndarray) -> float:
    """Equations 17 to 20 for the scores [n, E] of a sequence."""
    chosen = np.argsort(-scores, axis=1)[:, :TOP_K]
    f = EXPERTS / (TOP_K * len(scores)) * np.bincount(chosen.ravel(), minlength=EXPERTS)
    normalised = scores / scores.sum(axis=1, keepdims=True)
    return float(f @ normalised.mean(axis=0))


def balance_by_hand(logits: np.ndarray, documents: np.ndarray | None) -> float:
    scores, total, tokens = 1 / (1 + np.exp(-logits.astype(np.float64))), 0.0, 0
    for row, of_row in enumerate(scores):
        at = np.ones(len(of_row), int) if documents is None else documents[row]
        for document in set(at) - {0}:
            total += of_sequence(of_row[at == document]) * (at == document).sum()
            tokens += (at == document).sum()
    return total / tokens


def balance_of(logits, sequences, valid=None) -> jax.Array:
    flat = jnp.asarray(logits).reshape(-1, EXPERTS)
    _, stats = route(flat, TOP_K, "topk_sigmoid", valid=valid, sequences=sequences)
    return stats.sequence_balance


def test_rows_and_documents_are_balanced_each_by_itself():
    valid = jnp.asarray(DOCUMENTS > 0).reshape(-1)
    of_rows, of_documents = balance_of(LOGITS, 3), balance_of(LOGITS, jnp.asarray(DOCUMENTS), valid)
    np.testing.assert_allclose(of_rows, balance_by_hand(LOGITS, None), rtol=1e-6)
    np.testing.assert_allclose(of_documents, balance_by_hand(LOGITS, DOCUMENTS), rtol=1e-6)
    assert balance_of(LOGITS, None) == 0 and abs(of_rows - of_documents) > 1e-3
    # Rows that are one document are rows, and what is in the padding does not matter.
    np.testing.assert_allclose(balance_of(LOGITS, jnp.ones((3, 8), jnp.int32)), of_rows, rtol=1e-6)
    other = jnp.where(jnp.asarray(DOCUMENTS)[..., None] > 0, LOGITS, 9.0)
    assert balance_of(other, jnp.asarray(DOCUMENTS), valid) == of_documents


@long
def test_its_gradient_is_that_of_the_mean_scores_and_parts_of_a_batch_add_up():
    documents = jnp.asarray(DOCUMENTS)
    valid = documents.reshape(-1) > 0
    slope = jax.grad(lambda logits: balance_of(logits, documents, valid))(jnp.asarray(LOGITS))
    # The loads stay as they are where a logit moves by little.
    at, step = (0, 4, 2), 1e-3
    moved = [LOGITS.copy() for _ in range(2)]
    moved[0][at], moved[1][at] = LOGITS[at] + step, LOGITS[at] - step
    numerical = (balance_by_hand(moved[0], DOCUMENTS) - balance_by_hand(moved[1], DOCUMENTS)) / (2 * step)
    np.testing.assert_allclose(slope[at], numerical, rtol=1e-3)
    assert np.all(np.asarray(slope)[DOCUMENTS == 0] == 0)
    parts = [
        route(jnp.asarray(LOGITS[row]), TOP_K, "topk_sigmoid", valid=documents[row] > 0, sequences=documents[row, None])
        for row in range(3)
    ]
    added = means_of(jax.tree.map(lambda *leaves: sum(leaves), *[sums_of(stats) for _, stats in parts]))
    np.testing.assert_allclose(added.sequence_balance, balance_by_hand(LOGITS, DOCUMENTS), rtol=1e-6)
