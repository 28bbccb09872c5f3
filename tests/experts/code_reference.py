"""What codes stand for, entry by entry from the words of the format, float64 (see `functional.codes`)."""

import numpy as np


def unpacked(codes: np.ndarray, rows: int, bits: int) -> np.ndarray:
    """[rows, o], whole numbers."""
    fields = np.unpackbits(np.asarray(codes, np.uint8), axis=0, bitorder="little")[: rows * bits]
    return sum(fields.reshape(rows, bits, -1)[:, bit].astype(int) << bit for bit in range(bits))


def _scales(leaves, form) -> np.ndarray:
    if form.scale_bits == 16:
        return leaves["scales"].astype(np.float64)
    codes, steps = leaves["scale_codes"].astype(np.float64), leaves["scale_steps"].astype(np.float64)
    return steps * np.sign(codes) * (codes / 127) ** 2


def decoded(leaves, form, rows: int) -> np.ndarray:
    """The kernel [rows, o] of one expert, of a `Quantized` form."""
    leaves = {name: np.asarray(leaf) for name, leaf in leaves.items()}
    codes = unpacked(leaves["codes"], rows, form.bits)
    scales, out = _scales(leaves, form), np.empty(codes.shape)
    for row, code in enumerate(codes):
        group = 0 if form.group_size is None else row // form.group_size
        scale = np.broadcast_to(scales[group], code.shape)
        if form.zero_points:
            levels = 2 * (code - leaves["zeros"][group].astype(np.float64) * 2**form.bits / 256)
        elif form.table:
            levels = leaves["table"].astype(np.float64)[code]
        else:
            levels = np.where(scale < 0, 2 * code - 2**form.bits, 2 * code + 1 - 2**form.bits)
        out[row] = levels * scale * (leaves["row_scales"][row].astype(np.float64) if form.row_scales else 1)
    return out
