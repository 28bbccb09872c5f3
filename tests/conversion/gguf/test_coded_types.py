"""`--gguf-type as-coded`: experts in codes become K-quants of as many bits, matrix by matrix, and it is said."""

import dataclasses

import gguf
import numpy as np
import pytest

import moe_jax
from moe_jax.commands.cli import main
from moe_jax.compression.coding.coder import LeastError
from moe_jax.conversion import GGUFModel
from moe_jax.core.errors import InputError
from moe_jax.experts import BankConfig, BaseCodes, Mixed
from moe_jax.experts.forms import Quantized, ffn_matrices
from moe_jax.experts.forms.coding import Residual, own_of
from moe_jax.experts.on_host import base_kernel, expert_kernels
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.moe_models import EXPERTS, moe_config
from tests.support.tiers import one_in

DENSE = dense_config(num_layers=2, d_model=256, dim=256)
DENSE = dataclasses.replace(DENSE, family="llama")


def codes(bits, **others):
    return Quantized(bits=bits, group_size=32, **others)


def written(path, *banks):
    """A model whose experts are normal numbers in the codes of these banks; on a base, a sixteenth of its variance."""
    config = moe_config(DENSE, *banks)
    leaves, rng = random_leaves(config), np.random.default_rng(3)
    for layer in config.moe_layers:
        moe, folder = config.moe(layer), f"layers/{layer}/mlp/experts"
        for name, matrix in ffn_matrices(moe.expert, config.d_model).items():
            if not isinstance(moe.bank.form, Quantized | Mixed):
                continue
            on_base, size = moe.bank.has_base_of(name), 256**-0.5
            if on_base and moe.bank.base_codes is not None:
                kernel = size * rng.normal(size=matrix.shape).astype(np.float32)
                stored, _ = moe.bank.base_codes.form.stored(kernel, matrix, LeastError())
                leaves |= {f"{folder}/base/{name}/{leaf}": values for leaf, values in stored.items()}
            stacks: dict[str, list[np.ndarray]] = {}
            for expert in range(EXPERTS):
                own = own_of(moe.bank.form, expert)
                values = (size / 4 if on_base else size) * rng.normal(size=matrix.shape).astype(np.float32)
                made, _ = own.form.of_matrix(matrix).encode(Residual(values, np.dtype("f4")), matrix, LeastError())
                for leaf, array in made.items():
                    stacks.setdefault(f"{folder}/delta/{name}/{own.folder}{leaf}", []).append(np.asarray(array))
            leaves |= {leaf: np.stack(arrays) for leaf, arrays in stacks.items()}
    return write_model(path, config, leaves)


NONE = {"base": "none"}
CASES = {
    "by matrix": ([BankConfig(codes(3, down_bits=8), **NONE)], "Q3_K Q3_K Q8_0", "Q3_K_M"),
    "one bit": ([BankConfig(codes(1, up_bits=4), **NONE)], "Q2_K Q4_K Q2_K", "Q2_K"),
    "two layers": (
        [BankConfig(codes(2), **NONE), BankConfig(codes(4, gate_bits=3), **NONE)],
        "Q2_K Q2_K Q2_K Q3_K Q4_K Q4_K",
        "Q2_K",
    ),
    "the more of two parts": (
        [BankConfig(Mixed(parts=(codes(2), codes(4, up_bits=3)), part_of=(0, 1, *[0] * (EXPERTS - 2))), **NONE)],
        "Q4_K Q3_K Q4_K",
        "Q4_K_M",
    ),
    # Sums are four times as large as what was added.
    "on a base": ([BankConfig(codes(2, down_bits=4))], "Q4_K Q4_K Q6_K", "Q4_K_M"),
    "on a base in codes": (
        [BankConfig(codes(3), base_codes=BaseCodes(code="4", group_size=32, down_bits=0))],
        "Q5_K Q5_K Q3_K",
        "Q5_K_M",
    ),
    "at most the bits of the base more": (
        [BankConfig(codes(1), base_codes=BaseCodes(code="2", group_size=32))],
        "Q3_K Q3_K Q3_K",
        "Q3_K_M",
    ),
}


def types_of(file):
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}


@one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_types_are_those_of_codes(tmp_path, name):
    """Of every case, and that what is read is near to what the codes stand for."""
    banks, expected, mix = CASES[name]
    model = written(tmp_path / "model", *[*banks, None][:2])
    types = types_of(moe_jax.export(model, tmp_path / "m.gguf", format="gguf", gguf_type="as-coded"))
    own = [types[f"blk.{i}.ffn_{matrix}_exps.weight"] for i in range(len(banks)) for matrix in ("gate", "up", "down")]
    assert " ".join(own) == expected
    assert gguf.GGUFReader(tmp_path / "m.gguf").fields["general.file_type"].contents() == int(
        gguf.LlamaFileType[f"MOSTLY_{mix}"]
    )
    # All else is as in that mix.
    other = types_of(moe_jax.export(model, tmp_path / "mix.gguf", format="gguf", gguf_type=mix))
    experts = {f"blk.{i}.ffn_{matrix}_exps.weight" for i in range(len(banks)) for matrix in ("gate", "up", "down")}
    assert {one: types[one] for one in types.keys() - experts} == {one: other[one] for one in types.keys() - experts}
    source, back = moe_jax.load(model).source, GGUFModel(tmp_path / "m.gguf")
    bound = {"Q2_K": 0.35, "Q3_K": 0.2, "Q4_K": 0.12, "Q5_K": 0.06, "Q6_K": 0.03, "Q8_0": 0.01}
    moe = source.config.moe(0)
    for (matrix, description), kind in zip(ffn_matrices(moe.expert, 256).items(), own, strict=False):
        whole = np.stack(list(expert_kernels(source.read, moe.bank, "layers/0/mlp/experts", description)))
        error = back.read(f"layers/0/mlp/experts/{matrix}/kernel") - whole
        assert np.linalg.norm(error) < bound[kind] * np.linalg.norm(whole), matrix


def test_one_bit_more_halves_the_error_of_what_was_added(tmp_path):
    """The rule for a shared base: the new error is about that of the codes, and not that of as many bits of the sum."""
    model = written(tmp_path / "model", BankConfig(codes(2)), None)
    source = moe_jax.load(model).source
    moe = source.config.moe(0)
    matrix = ffn_matrices(moe.expert, 256)["up"]
    whole = np.stack(list(expert_kernels(source.read, moe.bank, "layers/0/mlp/experts", matrix)))
    added = whole - np.asarray(base_kernel(source.read, moe.bank, "layers/0/mlp/experts", matrix), np.float32)
    errors = {}
    for kind in ("as-coded", "Q2_K"):
        file = moe_jax.export(model, tmp_path / f"{kind}.gguf", format="gguf", gguf_type=kind)
        errors[kind] = np.linalg.norm(GGUFModel(file).read("layers/0/mlp/experts/up/kernel") - whole)
    codes_of_two_bits = 0.3 * np.linalg.norm(added)
    assert errors["as-coded"] < 1.5 * codes_of_two_bits < errors["Q2_K"]


def test_it_is_said_what_becomes_of_codes(tmp_path, capsys):
    model = written(tmp_path / "model", BankConfig(codes(2), **NONE), BankConfig(codes(3)))
    given = ["export", str(model), str(tmp_path / "m.gguf"), "--format", "gguf", "--gguf-type", "as-coded"]
    assert main([*given, "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    kinds = "2-bit to Q2_K (x3), 3-bit on a base to Q5_K (x3)"
    # 84 and 176 bytes of 256 numbers
    assert f"codes of experts are rounded again, which loses a little: {kinds}; 4.06 bits per weight." in said
    assert "The rest is as in Q2_K: of the whole model," in said and not (tmp_path / "m.gguf").exists()
    assert main(given) == 0


@pytest.mark.parametrize("bank", [None, BankConfig()])
def test_without_codes_there_is_no_such_type(tmp_path, bank):
    config = DENSE if bank is None else moe_config(DENSE, bank, None)
    model = write_model(tmp_path / "model", config, random_leaves(config))
    with pytest.raises(InputError, match="no experts are") as caught:
        moe_jax.export(model, tmp_path / "m.gguf", format="gguf", gguf_type="as-coded")
    assert len(str(caught.value).splitlines()) == 1 and not (tmp_path / "m.gguf").exists()
