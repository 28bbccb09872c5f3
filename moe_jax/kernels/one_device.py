"""Whether a kernel can be called where a function is traced."""

import jax


def one_device() -> bool:
    """Whether the function being traced runs on one device, or is the part of one inside `shard_map`.

    Only there can it call a kernel: the compiler cannot divide one between devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or mesh.size == 1 or all(kind == jax.sharding.AxisType.Manual for kind in mesh.axis_types)
