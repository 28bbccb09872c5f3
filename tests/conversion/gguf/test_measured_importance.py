"""`export --format gguf --calibrate`: the importance is that of a plain computation, and the blocks follow it."""

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

import moe_jax  # noqa: E402
from moe_jax.commands.cli import main  # noqa: E402
from moe_jax.compression.calibration.coded_pass import CodedPass  # noqa: E402
from moe_jax.conversion.gguf.imatrix import read_imatrix  # noqa: E402
from moe_jax.conversion.writing.leaf_writing import LeafWriting  # noqa: E402
from moe_jax.core.errors import InputError  # noqa: E402
from tests.support.byte_tokenizer import byte_tokenizer  # noqa: E402
from tests.support.hf_checkpoints import BASE, CONFIGS, random_tensors, write_checkpoint  # noqa: E402
from tests.support.tiers import one_in  # noqa: E402

LENGTH = 32
WIDE = {**BASE, "vocab_size": 264, "hidden_size": 256, "intermediate_size": 288, "num_hidden_layers": 2,
        "rope_theta": 10000.0}  # fmt: skip
LLAMA = {**WIDE, "model_type": "llama"}
MIXTRAL = {**WIDE, "model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}
Q4 = ("--format", "gguf", "--gguf-type", "Q4_K_M")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("All the world is a stage, and all the men and women merely players. " * 4)
    return file


def windows(text) -> np.ndarray:
    ids = np.frombuffer(text.read_bytes(), np.uint8)
    return ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH).astype(int)


def made(folder, config):
    """A checkpoint with a tokenizer, some of whose inputs are much larger than others."""
    tensors = random_tensors(config)
    rng = np.random.default_rng(5)
    for name, values in tensors.items():
        if "norm" in name:
            values *= np.exp(1.5 * rng.normal(size=values.shape)).astype(np.float32)
    write_checkpoint(folder, config, tensors)
    byte_tokenizer(folder / "tokenizer.json")
    return folder, tensors


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: made(folder / name, config) for name, config in (("llama", LLAMA), ("mixtral", MIXTRAL))}


def calibrated(checkpoint, out, text, *more) -> int:
    given = ["export", checkpoint, out, *Q4, "--calibrate", text, "--seq-len", LENGTH, *more]
    return main([str(word) for word in given])


def types_of(file) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        tensor.name: (tensor.tensor_type.name, tuple(int(size) for size in tensor.shape[::-1]))
        for tensor in gguf.GGUFReader(file).tensors
    }


# ---- the same computation, plainly --------------------------------------------------------------


def normed(x, weight):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + BASE["rms_norm_eps"]) * weight


def rotated(x):
    """[windows, tokens, heads, d]: the halves of a head are turned by the place of the token."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] / 10000 ** (np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def silu(x):
    return x / (1 + np.exp(-x))


def mixed(config, get, x):
    """What attention makes of normed inputs before its output projection."""
    heads, pairs = config["num_attention_heads"], config["num_key_value_heads"]
    q, k, v = (x @ get(f"self_attn.{name}_proj.weight").T for name in "qkv")
    q, k, v = (part.reshape(*x.shape[:2], n, -1) for part, n in ((q, heads), (k, pairs), (v, pairs)))
    k, v = (np.repeat(part, heads // pairs, axis=2) for part in (rotated(k), v))
    scores = np.einsum("bqhd,bkhd->bhqk", rotated(q), k) / np.sqrt(q.shape[-1])
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    return np.einsum("bhqk,bkhd->bqhd", softmax(scores), v).reshape(x.shape)


def routed(config, get, x):
    """Of an MoE on tokens [n, d]: its output, and mean squares of what experts are given, and of hidden neurons."""
    chosen = np.argsort(-(x @ get("block_sparse_moe.gate.weight").T), -1)[:, : config["num_experts_per_tok"]]
    logits = np.take_along_axis(x @ get("block_sparse_moe.gate.weight").T, chosen, -1)
    weights, out, found = softmax(logits), np.zeros_like(x), []
    for expert in range(config["num_local_experts"]):
        w1, w2, w3 = (get(f"block_sparse_moe.experts.{expert}.w{i}.weight") for i in (1, 2, 3))
        hidden, own = silu(x @ w1.T) * (x @ w3.T), np.where(chosen == expert, weights, 0).sum(-1)
        out += own[:, None] * (hidden @ w2.T)
        # By squares of router weights; and some of all tokens, together as much as 64 that are routed to it.
        here = own > 0
        some, usual = np.linspace(0, len(x) - 1, min(512, len(x))).astype(int), np.mean(own[here] ** 2)
        rows = np.concatenate([np.flatnonzero(here), some])
        count = np.concatenate([own[here] ** 2, np.full(len(some), usual * 64 / len(some))])
        means = [(count[:, None] * values[rows] ** 2).sum(0) / count.sum() for values in (x, hidden)]
        found.append((*means, here.sum()))
    return out, found


def mean_squares(config, tensors, ids) -> tuple[dict[str, np.ndarray], dict[str, list[int]]]:
    """Of every matrix, by its name in GGUF files: mean squares [experts, in], and how many tokens came to it."""
    x = tensors["model.embed_tokens.weight"].astype(np.float64)[ids]
    means, counts, tokens = {}, {}, ids.size
    flat = lambda values: values.reshape(tokens, -1)  # noqa: E731

    def note(name, values):
        means[f"{name}.weight"] = (flat(values) ** 2).mean(0)[None]
        counts[f"{name}.weight"] = [tokens]

    for i in range(config["num_hidden_layers"]):
        get = lambda name, i=i: tensors[f"model.layers.{i}.{name}"].astype(np.float64)  # noqa: E731
        y = normed(x, get("input_layernorm.weight"))
        for name in "qkv":
            note(f"blk.{i}.attn_{name}", y)
        y = mixed(config, get, y)
        note(f"blk.{i}.attn_output", y)
        x = x + y @ get("self_attn.o_proj.weight").T
        y = normed(x, get("post_attention_layernorm.weight"))
        if config["model_type"] == "llama":
            hidden = silu(y @ get("mlp.gate_proj.weight").T) * (y @ get("mlp.up_proj.weight").T)
            for name, values in (("gate", y), ("up", y), ("down", hidden)):
                note(f"blk.{i}.ffn_{name}", values)
            x = x + hidden @ get("mlp.down_proj.weight").T
            continue
        out, found = routed(config, get, flat(y))
        for name, place in (("gate", 0), ("up", 0), ("down", 1)):
            means[f"blk.{i}.ffn_{name}_exps.weight"] = np.stack([one[place] for one in found])
            counts[f"blk.{i}.ffn_{name}_exps.weight"] = [one[2] for one in found]
        x = x + out.reshape(x.shape)
    note("output", normed(x, tensors["model.norm.weight"]))
    return means, counts


@pytest.mark.parametrize(("name", "config"), [("llama", LLAMA), ("mixtral", MIXTRAL)])
def test_importance_is_that_of_a_plain_computation(checkpoints, text, tmp_path, name, config):
    """And what is saved, read again, gives the same file."""
    folder, tensors = checkpoints[name]
    measured, again, saved = tmp_path / "measured.gguf", tmp_path / "again.gguf", tmp_path / "imatrix.gguf"
    assert calibrated(folder, measured, text, "--save-imatrix", saved) == 0
    types = types_of(measured)
    found = read_imatrix(saved, {tensor: shape for tensor, (_, shape) in types.items()})
    expected, counts = mean_squares(config, tensors, windows(text))
    assert found.keys() == {tensor for tensor, (kind, _) in types.items() if kind != "F32"} - {"token_embd.weight"}
    for tensor, means in found.items():
        # Inputs of experts are kept in bfloat16.
        np.testing.assert_allclose(means, expected[tensor], 3e-2 if "exps" in tensor else 2e-3, err_msg=tensor)
    stored = {one.name: one.data for one in gguf.GGUFReader(saved).tensors}
    for tensor in found:
        assert stored[f"{tensor}.counts"].ravel().tolist() == counts[tensor], tensor
    said = {key: field.contents() for key, field in gguf.GGUFReader(saved).fields.items()}
    assert said["imatrix.datasets"] == [str(text)]
    assert (said["imatrix.chunk_count"], said["imatrix.chunk_size"]) == windows(text).shape
    moe_jax.export(folder, again, format="gguf", gguf_type="Q4_K_M", imatrix=saved)
    assert types_of(again) == types
    contents = [[one.data.tobytes() for one in gguf.GGUFReader(file).tensors] for file in (measured, again)]
    assert contents[0] == contents[1]


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_weighted_errors_fall(checkpoints, text, tmp_path, name):
    """Of all types: those of 256 numbers, and those that stand in for them."""
    folder, tensors = checkpoints[name]
    means, _ = mean_squares({"llama": LLAMA, "mixtral": MIXTRAL}[name], tensors, windows(text))
    assert calibrated(folder, tmp_path / "by_text.gguf", text) == 0
    moe_jax.export(folder, tmp_path / "rounded.gguf", format="gguf", gguf_type="Q4_K_M")
    moe_jax.export(folder, tmp_path / "whole.gguf", format="gguf", gguf_type="F32")
    whole = {one.name: one.data for one in gguf.GGUFReader(tmp_path / "whole.gguf").tensors}
    errors: dict[str, list[float]] = {}
    for file in ("by_text", "rounded"):
        for one in gguf.GGUFReader(tmp_path / f"{file}.gguf").tensors:
            if one.name in means and one.tensor_type.name not in ("F32", "Q8_0"):
                values = gguf.quants.dequantize(one.data, one.tensor_type).reshape(whole[one.name].shape)
                weight = means[one.name].reshape(-1, 1, values.shape[-1])
                errors.setdefault(one.name, []).append(float((weight * (values - whole[one.name]) ** 2).sum()))
    assert {kind for kind, _ in types_of(tmp_path / "by_text.gguf").values()} >= {"Q4_K", "Q6_K", "Q5_0"}
    assert len(errors) == 14
    for tensor, (ours, rounded) in errors.items():
        share = 0.95 if "attn_output" in tensor else 0.8  # whose inputs are of one size
        assert ours < share * rounded, (tensor, ours / rounded)


def test_latent_attention_is_measured_where_it_is_a_map(text, tmp_path):
    """Values of all heads have the same inputs; keys are stored the other way around."""
    config = {**CONFIGS["deepseek_v2"], "vocab_size": 264, "kv_lora_rank": 32, "q_lora_rank": None}
    folder, _ = made(tmp_path / "hf", config)
    saved = tmp_path / "imatrix.gguf"
    more = ("--format", "gguf", "--gguf-type", "Q4_0", "--save-imatrix", str(saved))
    given = ["export", str(folder), str(tmp_path / "m.gguf"), "--calibrate", str(text), "--seq-len", str(LENGTH)]
    assert main([*given, *more]) == 0
    types = types_of(tmp_path / "m.gguf")
    found = read_imatrix(saved, {tensor: shape for tensor, (_, shape) in types.items()})
    assert "blk.1.attn_k_b.weight" not in found
    heads = found["blk.1.attn_v_b.weight"]
    assert heads.shape == (config["num_attention_heads"], config["kv_lora_rank"])
    assert (heads == heads[0]).all() and (heads > 0).any()
    assert found["blk.1.ffn_up_shexp.weight"].shape == (1, config["hidden_size"])


# ---- what goes wrong -----------------------------------------------------------------------------


def test_a_dry_run_does_not_run_the_model(checkpoints, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(CodedPass, "begin", lambda *_: pytest.fail("the model is run"))
    saved = tmp_path / "imatrix.gguf"
    folder, _ = checkpoints["llama"]
    assert calibrated(folder, tmp_path / "m.gguf", text, "--save-imatrix", saved, "--dry-run") == 0
    assert "Q4_K" in capsys.readouterr().out and not list(tmp_path.iterdir())


@one_in(3)
@pytest.mark.parametrize(("where", "begun"), [("layer", [1]), ("head", []), ("writing", [])])
def test_a_killed_job_goes_on(checkpoints, text, tmp_path, monkeypatch, where, begun):
    folder, _ = checkpoints["mixtral"]
    once, again, saved = tmp_path / "once.gguf", tmp_path / "again" / "once.gguf", tmp_path / "imatrix.gguf"
    assert calibrated(folder, once, text, "--save-imatrix", tmp_path / "first.gguf") == 0
    kind, name = {"layer": (CodedPass, "finish"), "head": (CodedPass, "_moment_of_head")}.get(
        where, (LeafWriting, "_write_leaf")
    )
    whole = getattr(kind, name)

    def stop(self, *given):
        if (where == "layer" and self.next == 0) or (where == "writing" and not given[0].startswith("layers/1/mlp")):
            return whole(self, *given)
        raise OSError("as if the disk was full")

    monkeypatch.setattr(kind, name, stop)
    assert calibrated(folder, again, text, "--save-imatrix", saved) != 0
    assert not again.exists() and not saved.exists()
    monkeypatch.undo()
    done, begin = [], CodedPass.begin
    monkeypatch.setattr(CodedPass, "begin", lambda self, layer: (done.append(layer), begin(self, layer))[1])
    assert calibrated(folder, again, text, "--save-imatrix", saved) == 0
    assert done == begun
    assert again.read_bytes() == once.read_bytes() and saved.read_bytes() == (tmp_path / "first.gguf").read_bytes()
    assert not list(tmp_path.glob(".*")) and [file.name for file in again.parent.iterdir()] == ["once.gguf"]


def test_a_job_with_other_samples_begins_anew(checkpoints, text, tmp_path, monkeypatch):
    folder, _ = checkpoints["llama"]
    out, whole = tmp_path / "m.gguf", LeafWriting._write_leaf

    def stop(self, path):
        if path.startswith("layers/1/mlp"):
            raise OSError("as if the disk was full")
        whole(self, path)

    monkeypatch.setattr(LeafWriting, "_write_leaf", stop)
    assert calibrated(folder, out, text, "--samples", 2) != 0
    monkeypatch.undo()
    assert calibrated(folder, out, text, "--samples", 3) == 0
    assert calibrated(folder, tmp_path / "other" / "m.gguf", text, "--samples", 3) == 0
    assert out.read_bytes() == (tmp_path / "other" / "m.gguf").read_bytes()


def test_another_seed_draws_other_windows(checkpoints, text, tmp_path):
    written = []
    for number, words in enumerate([(), ("--calibration-seed", 0), ("--calibration-seed", 1)]):
        out = tmp_path / str(number) / "m.gguf"
        assert calibrated(checkpoints["llama"][0], out, text, "--samples", 3, *words) == 0
        written.append(out.read_bytes())
    assert written[0] == written[1] != written[2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gguf_type": None}, "F32.*choose another"),
        ({"gguf_type": "Q8_0"}, "Q8_0.*choose another"),
        ({"save_imatrix": "{m}"}, "name of the model"),
        ({"save_imatrix": "{text}"}, "already exists"),
        ({"calibrate": None, "save_imatrix": "{new}"}, "only with --calibrate"),
        ({"format": "gptq", "gguf_type": None, "save_imatrix": "{new}"}, "only with --format gguf"),
        ({"imatrix": "{text}"}, "give one of them"),
        ({"samples": 0}, "at least 1"),
        ({"calibration_seed": -1}, "must not be negative"),
        ({"samples": 9999}, "ask for at most"),
    ],
)
def test_options_that_cannot_be(checkpoints, text, tmp_path, options, said):
    places = {"{m}": tmp_path / "m.gguf", "{text}": text, "{new}": tmp_path / "new"}
    given = {"format": "gguf", "gguf_type": "Q4_K_M", "calibrate": text, "seq_len": LENGTH} | options
    given |= {name: places.get(value, value) for name, value in options.items() if isinstance(value, str)}
    given |= {"seq_len": None} if given["calibrate"] is None else {}
    with pytest.raises(InputError, match=said) as caught:
        moe_jax.export(checkpoints["llama"][0], tmp_path / "m.gguf", **given)
    assert len(str(caught.value).splitlines()) == 1 and not list(tmp_path.iterdir())


def test_an_imatrix_that_changes_nothing_is_refused(checkpoints, text, tmp_path):
    with pytest.raises(InputError, match="--imatrix: no matrix"):
        moe_jax.export(checkpoints["llama"][0], tmp_path / "m.gguf", format="gguf", gguf_type="F16", imatrix=text)


@pytest.mark.parametrize(("name", "said"), [("llama", "tokenizer.json"), ("t5", "encoder")])
def test_models_that_cannot_read_the_text(text, tmp_path, capsys, name, said):
    folder = write_checkpoint(tmp_path / "hf", CONFIGS[name], random_tensors(CONFIGS[name]))
    assert calibrated(folder, tmp_path / "m.gguf", text) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("moe-jax: error")]
    assert said in line and [file.name for file in tmp_path.iterdir()] == ["hf"]


def test_a_damaged_note_is_told(checkpoints, text, tmp_path, monkeypatch, capsys):
    folder, _ = checkpoints["llama"]
    finish = CodedPass.finish

    def stop(self, decoded):
        if self.next:
            raise OSError("as if the disk was full")
        finish(self, decoded)

    monkeypatch.setattr(CodedPass, "finish", stop)
    assert calibrated(folder, tmp_path / "m.gguf", text) != 0
    monkeypatch.undo()
    (file,) = tmp_path.glob(".*/0.squares.npz")
    file.write_bytes(file.read_bytes()[:100])
    capsys.readouterr()
    assert calibrated(folder, tmp_path / "m.gguf", text) == 2
    assert "0.squares.npz" in capsys.readouterr().err
    assert calibrated(folder, tmp_path / "m.gguf", text) == 0
    assert (tmp_path / "m.gguf").exists()
