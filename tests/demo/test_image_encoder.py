"""The image encoder of the demo: DINOv2 as an exported graph holds it, and back."""

import sys

import numpy as np
import pytest
import safetensors.numpy

from moe_jax.conversion import HuggingFaceDirectory
from moe_jax.core.errors import InputError
from moe_jax.demo.image_encoder import PREFIX, main, write_encoder
from tests.support.vision_models import Shape, random_tower

onnx = pytest.importorskip("onnx")
pytest.importorskip("transformers")

WIDTH, SIDE = 64, 3
# Of the vectors alone a graph has names, but for the patches, whose kernel is that of a convolution.
NAMED = ("bias", "lambda1", "cls_token", "embeddings.patch_embeddings.projection.weight")


def graph_of(tensors: dict[str, np.ndarray], *, without: str = ""):
    """A graph as exporters leave it: kernels and positions have lost their names, and kernels lie transposed."""
    held, nodes = {"onnx::other": np.ones((2, 3), np.float32)}, []
    for name, value in tensors.items():
        if name == "embeddings.position_embeddings":
            held |= {"onnx::first": value[:, :1], "onnx::rest": value[:, 1:]}
        elif name.endswith(NAMED) or "norm" in name:
            held[PREFIX + name] = value
        elif name.endswith(".weight"):
            number = len(nodes)
            held[f"onnx::MatMul_{number}"] = np.ascontiguousarray(value.T)
            product = onnx.helper.make_node("MatMul", [f"x{number}", f"onnx::MatMul_{number}"], [f"y{number}"])
            bias = PREFIX + name.removesuffix("weight") + "bias"
            nodes += [product, onnx.helper.make_node("Add", [bias, f"y{number}"], [f"z{number}"])]
    held = {name: value for name, value in held.items() if name != without}
    constants = [onnx.numpy_helper.from_array(np.ascontiguousarray(value), name) for name, value in held.items()]
    return onnx.helper.make_model(onnx.helper.make_graph(nodes, "encoder", [], [], constants))


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    """Those of a file: models in memory have other names."""
    folder = tmp_path_factory.mktemp("tower")
    random_tower("dinov2", Shape(WIDTH, 1, 2 * WIDTH, 2, 4, SIDE)).save_pretrained(folder)
    return safetensors.numpy.load_file(folder / "model.safetensors")


def test_an_encoder_is_found_in_a_graph(tmp_path, tensors, capsys):
    onnx.save(graph_of(tensors), tmp_path / "graph.onnx")
    main([str(tmp_path / "graph.onnx"), str(tmp_path / "dinov2")])
    found = safetensors.numpy.load_file(tmp_path / "dinov2/model.safetensors")
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert "mask_token" in name or np.array_equal(found[name], value), name
    config = HuggingFaceDirectory(tmp_path / "dinov2").config
    assert (config.family, config.d_model, len(config.layers)) == ("dinov2", WIDTH, 2)
    assert config.patches is not None and config.patches.grid == (SIDE, SIDE)
    assert f"{sum(value.size for value in tensors.values()):,} parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("without", "said"),
    [
        ("backbone.embeddings.cls_token", "no image encoder"),
        ("onnx::rest", "expected positions"),
        ("backbone.encoder.layer.0.norm1.weight", "norm1.weight"),
        ("backbone.encoder.layer.0.mlp.fc1.bias", "mlp.fc1.bias"),
        ("backbone.embeddings.patch_embeddings.projection.weight", "projection.weight"),
    ],
)
def test_a_graph_without_an_encoder_is_an_error(tmp_path, tensors, capsys, without, said):
    onnx.save(graph_of(tensors, without=without), tmp_path / "graph.onnx")
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "graph.onnx"), str(tmp_path / "dinov2")])
    assert said in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["graph.onnx"]


def test_numbers_that_are_none_and_tensors_elsewhere_are_errors(tmp_path, tensors):
    wild = tensors | {"embeddings.cls_token": np.full((1, 1, WIDTH), np.nan, np.float32)}
    onnx.save(graph_of(wild), tmp_path / "wild.onnx")
    with pytest.raises(InputError, match="cls_token is not finite"):
        write_encoder(tmp_path / "wild.onnx", tmp_path / "dinov2")
    onnx.save(graph_of(tensors), tmp_path / "apart.onnx", save_as_external_data=True, size_threshold=0)
    with pytest.raises(InputError, match="in other files"):
        write_encoder(tmp_path / "apart.onnx", tmp_path / "dinov2")
    assert not (tmp_path / "dinov2").exists()


@pytest.mark.parametrize("content", [b"not a graph", None])
def test_a_file_that_is_no_graph_is_an_error(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "graph.onnx").write_bytes(content)
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "graph.onnx"), str(tmp_path / "dinov2")])
    assert str(tmp_path / "graph.onnx") in capsys.readouterr().err


@pytest.mark.parametrize("absent", ["onnx", "safetensors.numpy"])
def test_a_package_that_is_absent_is_named(tmp_path, tensors, monkeypatch, capsys, absent):
    onnx.save(graph_of(tensors), tmp_path / "graph.onnx")
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "graph.onnx"), str(tmp_path / "dinov2")])
    assert f"pip install {absent.partition('.')[0]}" in capsys.readouterr().err
    assert not (tmp_path / "dinov2").exists()


def test_nothing_is_written_over(tmp_path, tensors):
    onnx.save(graph_of(tensors), tmp_path / "graph.onnx")
    (tmp_path / "dinov2").mkdir()
    with pytest.raises(InputError, match="exists"):
        write_encoder(tmp_path / "graph.onnx", tmp_path / "dinov2")
