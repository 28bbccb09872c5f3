"""A dense checkpoint becomes an MoE checkpoint, by way of memory: for models that fit there.

    python convert/upcycled_to_hf.py DENSE OUT

Every layer gets four experts, two for each token; Transformers loads the result. Before it is trained, the MoE
computes what the dense model does.
"""

import sys
from pathlib import Path

import moe_jax


def main(dense: str, out: str) -> Path:
    """Returns the Hugging Face directory."""
    moe = moe_jax.upcycle(moe_jax.load(dense), experts=4, top_k=2, every=1)
    print(moe)
    folder = moe_jax.export(moe, out)
    difference = moe.lineage[-1]["measured"]["step0_max_abs_difference"]
    print(f"{folder}: logits differ by {difference:.2g} from the dense model's")
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except (moe_jax.InputError, FileNotFoundError) as error:
        sys.exit(f"{error}")
