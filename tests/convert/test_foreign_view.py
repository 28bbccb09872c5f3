"""Upcycled models leave in Mixtral's format: deltas merged, dense layers as equal experts, same logits."""

import dataclasses
import itertools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from moe_jax.convert import HuggingFaceDirectory, export, read_hf_config
from moe_jax.convert.foreign_view import merged_config
from moe_jax.errors import InputError
from moe_jax.experts.forms.positions import to_csr
from moe_jax.loading import leaf_specs, load_model
from moe_jax.model_dir import ModelDirectory, ModelDirectoryWriter
from moe_jax.model_source import ModelSource
from moe_jax.models import BankConfig, FFNConfig, ModelConfig, MoEConfig
from tests.convert.conftest import CONFIGS, DTYPES, read_tensors

QUIET = Console(quiet=True)
BANKS = {
    "full": BankConfig(),
    "low-rank": BankConfig(kind="low-rank", rank=2),
    "sparse": BankConfig(kind="sparse", rate=0.9),
}
EXPERTS = 4
LLAMA = read_hf_config(CONFIGS["llama"])
FULL = BANKS["full"]


def upcycled(name: str, *banks: BankConfig | None, **moe: object) -> ModelConfig:
    """A dense config with an MoE of the given bank in some layers; None leaves a layer dense."""
    config = read_hf_config(CONFIGS[name])
    layers = [
        layer
        if bank is None
        else dataclasses.replace(
            layer, mlp=MoEConfig(**{"expert": layer.mlp, "num_experts": EXPERTS, "top_k": 2, "bank": bank} | moe)
        )
        for layer, bank in zip(config.layers, banks, strict=True)
    ]
    return dataclasses.replace(config, layers=tuple(layers))


def write_model(folder: pathlib.Path, config: ModelConfig, dtype: str = "float32") -> ModelDirectory:
    """A model directory of random numbers, deltas among them."""
    rng = np.random.default_rng(0)
    specs = leaf_specs(config)
    with ModelDirectoryWriter(folder, config, tokenizer_files=(), lineage=[]) as writer:
        for path, spec in specs.items():
            if path.endswith(("/columns", "/row_ends")):
                at, leaf = path.rsplit("/", 1)
                values = random_places(specs[at.replace("/delta/", "/base/") + "/kernel"].shape, specs[f"{at}/values"])
                values = values[("columns", "row_ends").index(leaf)]
            else:
                values = (rng.normal(size=spec.shape) * 0.2 + ("norm" in path)).astype(DTYPES[dtype])
            writer.write({path: values})
    return ModelDirectory(folder)


def random_places(shape: tuple[int, int], values: jax.ShapeDtypeStruct) -> tuple[np.ndarray, np.ndarray]:
    """Columns and row ends for every expert; the same whenever asked."""
    rng = np.random.default_rng(1)
    chosen = [np.sort(rng.choice(math.prod(shape), values.shape[1], replace=False)) for _ in range(values.shape[0])]
    columns, row_ends = zip(*(to_csr(positions, shape) for positions in chosen), strict=True)
    return np.stack(columns), np.stack(row_ends)


def logits(source: ModelSource, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(nnx.jit(lambda model, tokens: model(tokens).logits)(load_model(source), jnp.asarray(tokens)))


@pytest.mark.parametrize(
    ("name", "kind", "architecture"),
    [
        ("llama", "full", "MixtralForCausalLM"),
        ("llama-tied", "low-rank", "MixtralForCausalLM"),
        ("mistral", "sparse", "MixtralForCausalLM"),
        ("llama-llama3", "low-rank", "MixtralForCausalLM"),
        ("qwen3", "sparse", "Qwen3MoeForCausalLM"),
    ],
)
def test_transformers_gives_the_same_logits(tmp_path: pathlib.Path, name: str, kind: str, architecture: str):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    source = write_model(tmp_path / "ours", upcycled(name, None, BANKS[kind], None))
    export(source, tmp_path / "back", console=QUIET, max_shard_size="50kB")
    tokens = np.array([[1, 5, 9, 33, 2, 60, 17, 4, 4, 21, 8, 50]])
    ours = logits(source, tokens)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert type(model).__name__ == architecture
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        theirs = model.eval()(torch.tensor(tokens)).logits.numpy()
    assert np.abs(ours - theirs).max() < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BANKS)
def test_experts_are_base_plus_delta_in_the_dtype_of_the_base(tmp_path: pathlib.Path, kind: str, dtype: str):
    source = write_model(tmp_path / "ours", upcycled("llama", *[BANKS[kind]] * 3), dtype)
    export(source, tmp_path / "back", console=QUIET)
    tensors = read_tensors(tmp_path / "back")
    for ours, foreign in {"gate": "w1", "up": "w3", "down": "w2"}.items():
        at = "layers/2/mlp/experts"
        for e in range(EXPERTS):
            if kind == "full":
                expected = source.read(f"{at}/{ours}/kernel")[e]
            else:
                expected = source.read(f"{at}/base/{ours}/kernel").astype(np.float32)
            if kind == "low-rank":
                a, b = (source.read(f"{at}/delta/{ours}/{m}")[e].astype(np.float32) for m in "ab")
                expected = expected + a @ b
            if kind == "sparse":
                columns, ends, values = (
                    source.read(f"{at}/delta/{ours}/{m}")[e] for m in ("columns", "row_ends", "values")
                )
                for row, (begin, end) in enumerate(itertools.pairwise([0, *ends])):
                    expected[row, columns[begin:end]] += values[begin:end].astype(np.float32)
            found = tensors[f"model.layers.2.block_sparse_moe.experts.{e}.{foreign}.weight"]
            if kind == "low-rank":
                # The terms of a @ b may be added up in another order.
                ulp = 2 * float(jnp.finfo(DTYPES[dtype]).eps)
                np.testing.assert_allclose(found.astype(np.float32), expected.T, rtol=ulp, atol=1e-6)
            else:
                assert np.array_equal(found, expected.astype(DTYPES[dtype]).T)
            assert found.dtype == DTYPES[dtype]


def test_dense_layers_become_equal_experts_and_the_price_is_said(tmp_path: pathlib.Path):
    source = write_model(tmp_path / "ours", upcycled("llama", None, BANKS["low-rank"], None))
    console = Console(record=True, width=200, quiet=False, file=(tmp_path / "log").open("w"))
    export(source, tmp_path / "back", console=console)
    text = console.export_text()
    assert "exporting in the format of 'mixtral'" in text
    assert "2 dense layers become 4 equal experts each, which the format needs: same logits, 0.000 GB more" in text
    tensors = read_tensors(tmp_path / "back")
    up = source.read("layers/0/mlp/up/kernel").T
    for e in range(EXPERTS):
        assert np.array_equal(tensors[f"model.layers.0.block_sparse_moe.experts.{e}.w3.weight"], up)
    assert not tensors["model.layers.0.block_sparse_moe.gate.weight"].any()
    router = source.read("layers/1/mlp/router/kernel").T
    assert np.array_equal(tensors["model.layers.1.block_sparse_moe.gate.weight"], router)


def test_dense_layers_can_be_refused(tmp_path: pathlib.Path):
    source = write_model(tmp_path / "ours", upcycled("llama", None, BANKS["full"], None))
    with pytest.raises(InputError, match="needs an MoE in every layer, but 2 of 3 are dense; --dense-layers replicate"):
        export(source, tmp_path / "back", dense_layers="refuse", console=QUIET)
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("choice", ["replicate", "refuse"])
def test_dense_layers_stay_dense_where_the_format_has_them(tmp_path: pathlib.Path, choice: str):
    config = upcycled("qwen3", None, BANKS["full"], None)
    export(write_model(tmp_path / "ours", config), tmp_path / "back", dense_layers=choice, console=QUIET)
    back = HuggingFaceDirectory(tmp_path / "back").config
    assert (back.family, back.layers) == ("qwen3_moe", config.layers)


def test_a_damaged_model_directory_is_named_with_its_damage(tmp_path: pathlib.Path):
    source = write_model(tmp_path / "ours", upcycled("llama", None, FULL, None))
    other = dataclasses.replace(source.config, layers=(*source.config.layers, source.config.layers[0]))
    source.config = other
    with pytest.raises(InputError, match="ours does not hold the model its config.json describes: 9 problems"):
        export(source, tmp_path / "back", console=QUIET)


def test_a_mixtral_with_deltas_stays_a_mixtral(tmp_path: pathlib.Path):
    config = read_hf_config(CONFIGS["mixtral"])
    moe = dataclasses.replace(config.layers[0].mlp, bank=BANKS["sparse"])
    config = dataclasses.replace(
        config, layers=(config.layers[0], *(dataclasses.replace(layer, mlp=moe) for layer in config.layers[1:]))
    )
    export(write_model(tmp_path / "ours", config), tmp_path / "back", console=QUIET)
    assert HuggingFaceDirectory(tmp_path / "back").config == read_hf_config(CONFIGS["mixtral"])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (upcycled("qwen2", FULL, FULL, FULL), "a 'qwen2' model with MoE layers has no Hugging Face format"),
        (upcycled("llama", FULL, FULL, FULL, gate="softmax_topk"), "mlp.gate is 'softmax_topk', the format can only"),
        (upcycled("llama-biases", FULL, FULL, FULL), "attention.biases is ('q', 'k', 'v', 'o'), the format can"),
        (
            upcycled("llama", FULL, FULL, None, expert=FFNConfig(dim=16, activation="relu")),
            "layer 2 has the FFN FFNConfig(dim=48",
        ),
        (
            upcycled("llama", FULL, FULL, FULL, expert=FFNConfig(dim=16, gated=False)),
            "mlp.expert.gated is False, the format can only say True",
        ),
        (
            dataclasses.replace(
                LLAMA,
                layers=(
                    upcycled("llama", FULL, FULL, FULL).layers[0],
                    upcycled("llama", FULL, FULL, FULL, num_experts=8).layers[1],
                ),
            ),
            "one number of experts for all layers, but layer 0 has 4 and layer 1 has 8",
        ),
    ],
)
def test_what_mixtral_cannot_hold_is_refused_before_anything_is_read(config: ModelConfig, expected: str, tmp_path):
    @dataclasses.dataclass
    class Source:
        config: ModelConfig
        path: pathlib.Path

    with pytest.raises(InputError) as error:
        export(Source(config, tmp_path / "ours"), tmp_path / "back", console=QUIET)
    assert expected in str(error.value) and not (tmp_path / "back").exists()


def test_banks_may_differ_between_layers(tmp_path: pathlib.Path):
    source = write_model(tmp_path / "ours", upcycled("llama", *BANKS.values()))
    export(source, tmp_path / "back", console=QUIET)
    found = HuggingFaceDirectory(tmp_path / "back").read("layers/0/mlp/experts/up/kernel")
    assert np.array_equal(found, source.read("layers/0/mlp/experts/up/kernel"))


def test_code_of_the_old_format_is_not_named_in_the_new():
    config = dataclasses.replace(
        upcycled("llama", None, FULL, FULL), foreign={"auto_map": {"AutoConfig": "x.Y"}, "pad_token_id": 0}
    )
    assert merged_config(config, replicate_dense=True).foreign == {"pad_token_id": 0}
    assert merged_config(LLAMA, replicate_dense=True) is LLAMA
