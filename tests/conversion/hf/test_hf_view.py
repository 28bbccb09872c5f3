"""Upcycled models leave in a format that can hold them: deltas merged, same logits."""

import dataclasses
import io
import itertools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from moe_jax.conversion import HuggingFaceDirectory, export, read_hf_config, write_hf_config
from moe_jax.conversion.families import FAMILIES
from moe_jax.conversion.hf_format import exported_config, print_changes
from moe_jax.conversion.spec import ExportSpec
from moe_jax.core.errors import InputError
from moe_jax.experts.forms.sparse import to_csr
from moe_jax.model_io.loading import leaf_specs, load_model
from moe_jax.model_io.model_dir import ModelDirectory, ModelDirectoryWriter
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import BankConfig, FFNConfig, ModelConfig, MoEConfig
from tests.support.hf_checkpoints import CONFIGS, DTYPES, read_tensors
from tests.support.tiers import long, one_in

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


LOW_RANK, SPARSE = BANKS["low-rank"], BANKS["sparse"]
# What is exported, and the class of Transformers that loads it.
EXPORTS = {
    "llama": (upcycled("llama", None, FULL, None), "Mixtral"),
    "llama-tied": (upcycled("llama-tied", None, LOW_RANK, None), "Mixtral"),
    "mistral": (upcycled("mistral", None, SPARSE, None), "Mixtral"),
    "llama3": (upcycled("llama-llama3", None, LOW_RANK, None), "Mixtral"),
    "qwen3": (upcycled("qwen3", None, SPARSE, None), "Qwen3Moe"),
    "phi3": (upcycled("phi3-plain", None, LOW_RANK, FULL), "Mixtral"),
    "granite": (upcycled("granite-plain", LOW_RANK, FULL), "GraniteMoe"),
    "granite-one": (upcycled("granite-plain", FULL, SPARSE, universal="one", universal_dim=20), "GraniteMoeShared"),
    "olmo2": (upcycled("olmo2", None, LOW_RANK, FULL), "FlexOlmo"),
    # Qwen2-MoE always has a shared expert.
    "qwen2": (upcycled("qwen2", None, LOW_RANK, None), "Qwen2Moe"),
    "qwen2-every-layer": (upcycled("qwen2", SPARSE, FULL, LOW_RANK, gate="softmax_topk"), "Qwen2Moe"),
    # Weights of experts that do not sum to 1 have no place in Mixtral.
    "mistral-top1": (upcycled("mistral", None, FULL, FULL, gate="top1", top_k=1), "Qwen2Moe"),
    "llama-one": (upcycled("llama", FULL, None, FULL, universal="one", universal_dim=20), "Qwen2Moe"),
    "qwen2-med-extended": (upcycled("qwen2", LOW_RANK, None, SPARSE, universal="med", extended=True), "Qwen2Moe"),
    "qwen2-sigmoid-extended": (upcycled("qwen2", None, SPARSE, None, universal="sigmoid", extended=True), "Qwen2Moe"),
}


@one_in(8)
@pytest.mark.parametrize("name", EXPORTS)
def test_transformers_gives_the_same_logits(tmp_path: pathlib.Path, name: str):
    import torch
    import transformers

    config, architecture = EXPORTS[name]
    source = write_model(tmp_path / "ours", config)
    export(source, tmp_path / "back", ExportSpec(max_shard_size="50kB"), console=QUIET)
    tokens = np.array([[1, 5, 9, 33, 2, 60, 17, 4, 4, 21, 8, 50]])
    ours = logits(source, tokens)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert type(model).__name__ == f"{architecture}ForCausalLM"
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        theirs = model.eval()(torch.tensor(tokens)).logits.numpy()
    assert np.abs(ours - theirs).max() < 2e-5 * np.abs(theirs).max()


@one_in(2)
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
    assert "2 dense layers become 4 equal experts each, which the format needs: same logits, 110.6 kB more" in text
    tensors = read_tensors(tmp_path / "back")
    up = source.read("layers/0/mlp/up/kernel").T
    for e in range(EXPERTS):
        assert np.array_equal(tensors[f"model.layers.0.block_sparse_moe.experts.{e}.w3.weight"], up)
    assert not tensors["model.layers.0.block_sparse_moe.gate.weight"].any()
    router = source.read("layers/1/mlp/router/kernel").T
    assert np.array_equal(tensors["model.layers.1.block_sparse_moe.gate.weight"], router)


@pytest.mark.parametrize(
    ("name", "choice", "family"),
    [("qwen3", "replicate", "qwen3_moe"), ("qwen3", "refuse", "qwen3_moe"), ("llama", "refuse", "qwen2_moe")],
)
def test_dense_layers_stay_dense_where_the_format_has_them(tmp_path: pathlib.Path, name: str, choice: str, family: str):
    config = upcycled(name, None, BANKS["full"], None)
    export(write_model(tmp_path / "ours", config), tmp_path / "back", ExportSpec(dense_layers=choice), console=QUIET)
    back = HuggingFaceDirectory(tmp_path / "back").config
    assert (back.family, back.moe_layers) == (family, (1,))
    assert [back.layers[i] for i in (0, 2)] == [config.layers[i] for i in (0, 2)]


def test_dense_layers_can_be_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(FAMILIES, "llama", dataclasses.replace(FAMILIES["llama"], moe_formats=("mixtral",)))
    source = write_model(tmp_path / "ours", upcycled("llama", None, BANKS["full"], None))
    with pytest.raises(InputError, match="needs an MoE in .* but 2 of 3 are dense; --dense-layers replicate"):
        export(source, tmp_path / "back", ExportSpec(dense_layers="refuse"), console=QUIET)
    assert not (tmp_path / "back").exists()


def test_what_a_shared_expert_is_made_of(tmp_path: pathlib.Path):
    """Of nothing, of one of weight 1, and of the last delta over a base, which is said."""
    none, one = upcycled("qwen2", FULL, FULL, FULL), upcycled("qwen2", FULL, FULL, FULL, universal="one")
    extended = upcycled("qwen2", *[LOW_RANK] * 3, universal="sigmoid", extended=True)
    layers = (none.layers[0], extended.layers[1], one.layers[2])
    layers = tuple(
        dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, gate="topk_softmax")) for layer in layers
    )
    source = write_model(tmp_path / "ours", dataclasses.replace(none, layers=layers), "bfloat16")
    console = Console(record=True, width=200, file=(tmp_path / "log").open("w"))
    export(source, tmp_path / "back", console=console)
    for line in (
        "the MoEs of 1 layers get a shared expert of zeros, 48 wide, which the format needs: same logits",
        "the MoEs of 1 layers have their universal FFN in the bank: it is merged and stands beside it",
        "the MoEs of 1 layers have a universal FFN of weight 1, which is stored with weight 1/2 and twice its output",
    ):
        assert line in console.export_text(clear=False)
    tensors = read_tensors(tmp_path / "back")
    gates = [tensors[f"model.layers.{i}.mlp.shared_expert_gate.weight"] for i in range(3)]
    assert not gates[0].any() and not gates[2].any()
    assert np.array_equal(gates[1], source.read("layers/1/mlp/router/universal/kernel").T)
    for ours, foreign in {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}.items():
        shared = [tensors[f"model.layers.{i}.mlp.shared_expert.{foreign}.weight"] for i in range(3)]
        assert {tensor.dtype.name for tensor in shared} == {"bfloat16"} and not shared[0].any()
        a, b = (source.read(f"layers/1/mlp/experts/delta/{ours}/{m}")[-1].astype(np.float32) for m in "ab")
        merged = source.read(f"layers/1/mlp/experts/base/{ours}/kernel").astype(np.float32) + a @ b
        np.testing.assert_allclose(shared[1].astype(np.float32), merged.T, rtol=2**-7, atol=1e-6)
        universal = source.read(f"layers/2/mlp/universal/{ours}/kernel").T
        assert np.array_equal(shared[2], 2 * universal if ours == "down" else universal)
        assert shared[2].any()


@long
def test_what_only_deepseek_has_leaves_as_deepseek(tmp_path: pathlib.Path):
    """Biases on all projections of attention beside a universal FFN. That Transformers has no class for it is said."""
    config = upcycled("llama-biases", None, FULL, LOW_RANK, universal="med", expert=FFNConfig(dim=48))
    dense = dataclasses.replace(config.layers[0], mlp=FFNConfig(dim=48))
    source = write_model(tmp_path / "ours", dataclasses.replace(config, layers=(dense, *config.layers[1:])))
    console = Console(record=True, width=200, file=(tmp_path / "log").open("w"))
    export(source, tmp_path / "back", console=console, dry_run=True)
    assert "Transformers has no class for 'deepseek': it needs trust_remote_code=True" in console.export_text()
    export(source, tmp_path / "back", console=QUIET)
    back = HuggingFaceDirectory(tmp_path / "back")
    assert (back.config.family, back.config.moe_layers, back.config.moe(1).universal) == ("deepseek", (1, 2), "one")
    tokens = np.array([[1, 5, 9, 33, 2, 60, 17, 4, 4, 21, 8, 50]])
    expected = logits(source, tokens)
    assert np.abs(logits(back, tokens) - expected).max() < 2e-5 * np.abs(expected).max()


def test_code_that_must_come_with_a_model_is_named_though_its_family_stays():
    config = dataclasses.replace(
        read_hf_config({**CONFIGS["deepseek_v3"], "model_type": "kimi_k2"}),
        foreign={"auto_map": {"AutoConfig": "configuration_deepseek.X", "AutoModel": "someone/code--modeling_x.Y"}},
    )
    console = Console(record=True, width=200, file=io.StringIO())
    print_changes(config, exported_config(config, replicate_dense=True), {}, console)
    print_changes(LLAMA, LLAMA, {}, console)
    (said,) = console.export_text().splitlines()
    assert "'kimi_k2'" in said and "trust_remote_code" in said
    assert "configuration_deepseek.py" in said and "modeling_x" not in said
    assert write_hf_config(config)["auto_map"] == config.foreign["auto_map"]


def test_a_shared_expert_of_zeros_is_as_narrow_as_may_be():
    moe = exported_config(upcycled("qwen2", None, FULL, None), replicate_dense=True).moe(1)
    assert (moe.universal, moe.universal_dim, moe.gate) == ("sigmoid", 1, "topk_softmax")


def test_a_damaged_model_directory_is_named_with_its_damage(tmp_path: pathlib.Path):
    source = write_model(tmp_path / "ours", upcycled("llama", None, FULL, None))
    other = dataclasses.replace(source.config, layers=(*source.config.layers, source.config.layers[0]))
    source.config = other
    with pytest.raises(InputError, match="config.json describes: 9 problems"):
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
        (
            upcycled("stablelm-parallel-head-norms", FULL, FULL, FULL),
            "The nearest is that of 'moe_llava_stablelm': 3 layers (first: 0): attention.qk_norm is 'head_layer', the",
        ),
        (upcycled("phi", FULL, None, FULL), "'moe_llava_phi': head_bias is True, the format can only say False"),
        (
            upcycled("llama", None, FULL, FULL, universal="coder"),
            "The nearest is that of 'qwen2_moe': 2 layers (first: 1): mlp.universal is 'coder', the format",
        ),
        (
            upcycled("qwen3", FULL, FULL, FULL, gate="sigmoid_topk"),
            "mlp.gate is 'sigmoid_topk', the format can only say 'softmax_topk'",
        ),
        (
            upcycled("llama-biases", FULL, FULL, FULL),
            "The nearest is that of 'deepseek': 3 layers (first: 0): mlp.expert.bias is True, the format can",
        ),
        (
            upcycled("llama", FULL, FULL, None, expert=FFNConfig(dim=16, activation="relu")),
            "layer 2: mlp.activation is 'silu', the format can only say 'relu'",
        ),
        (
            upcycled("llama", FULL, FULL, FULL, expert=FFNConfig(dim=16, gated=False)),
            "mlp.expert.gated is False",
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
def test_what_no_format_can_hold_is_refused_before_anything_is_read(config: ModelConfig, expected: str, tmp_path):
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
    assert exported_config(config, replicate_dense=True).foreign == {"pad_token_id": 0}
    assert exported_config(LLAMA, replicate_dense=True) is LLAMA
