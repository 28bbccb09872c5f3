"""Pictures cut into patches, and learned positions interpolated to another grid."""

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# Of the cubic kernel, as PyTorch's bicubic interpolation has it (Keys 1981 has -0.5).
_A = -0.75


def patches_of(pixels: Float[Array, "B H W C"], size: int) -> Float[Array, "B n Cpp"]:
    """Returns the patches of pictures row by row, each as a vector: channel, then row, then column.

    What is left at the lower and the right edge is cut off, as a convolution whose stride is its width does.
    """
    batch, height, width, channels = pixels.shape
    rows, columns = height // size, width // size
    cut = pixels[:, : rows * size, : columns * size].reshape(batch, rows, size, columns, size, channels)
    return cut.transpose(0, 1, 3, 5, 2, 4).reshape(batch, rows * columns, channels * size * size)


def interpolated_positions(
    positions: Float[Array, "n d"], grid: tuple[int, int], wanted: tuple[int, int]
) -> Float[Array, "m d"]:
    """Returns the positions of a grid for another one, in float32: bicubic, without smoothing (DINOv2)."""
    if grid == wanted:
        return positions
    table = positions.astype(jnp.float32).reshape(*grid, -1)
    rows, columns = (jnp.asarray(_cubic_matrix(*pair)) for pair in zip(grid, wanted, strict=True))
    return jnp.einsum("Rr,rcd,Cc->RCd", rows, table, columns, precision="highest").reshape(wanted[0] * wanted[1], -1)


@functools.cache
def _cubic_matrix(given: int, wanted: int) -> Float[np.ndarray, "wanted given"]:
    """The linear map from values at `given` places to `wanted` ones of the same length; the ends go on as they are."""
    matrix = np.zeros((wanted, given))
    for out in range(wanted):
        center = (out + 0.5) * given / wanted - 0.5
        first = int(np.floor(center))
        for place in range(first - 1, first + 3):
            x = abs(center - place)
            near = ((_A + 2) * x - (_A + 3)) * x * x + 1
            far = ((_A * x - 5 * _A) * x + 8 * _A) * x - 4 * _A
            matrix[out, min(max(place, 0), given - 1)] += near if x <= 1 else far
    return matrix.astype(np.float32)
