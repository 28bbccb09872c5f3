"""The free-support Wasserstein barycenter of point clouds of equal size.

    python examples/barycenter.py

The clouds are noisy copies of one cloud, with their points in different orders. Their plain mean is near no cloud; the
barycenter is, and says which point of each cloud belongs to which of its own.
"""

import numpy as np

import moe_jax


def main() -> tuple[float, float]:
    """Returns the mean squared distance of the clouds to their plain mean, and to the barycenter."""
    random = np.random.default_rng(0)
    cloud = random.standard_normal((50, 3), np.float32)
    clouds = [random.permutation(cloud) + 0.05 * random.standard_normal((50, 3), np.float32) for _ in range(5)]

    found = moe_jax.free_support_barycenter(clouds)
    aligned = [one[order] for one, order in zip(clouds, found.permutations, strict=True)]

    def distance(points: np.ndarray, target: np.ndarray) -> float:
        return float(np.mean(np.sum((points - target) ** 2, axis=1)))

    plain = float(np.mean([distance(one, np.mean(clouds, axis=0)) for one in clouds]))
    barycenter = float(np.mean([distance(one, found.points) for one in aligned]))
    print(f"mean squared distance to the plain mean: {plain:.4f}")
    print(f"to the barycenter, in its order:         {barycenter:.4f} (noise alone: {3 * 0.05**2 * 4 / 5:.4f})")
    print(f"{found.rounds} rounds, converged: {found.converged}")
    return plain, barycenter


if __name__ == "__main__":
    main()
