"""Names of dtypes as people write them: `bf16` is bfloat16."""

from collections.abc import Collection

SHORT_NAMES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "half": "float16",
    "f32": "float32",
    "fp32": "float32",
}


def full_name(name: str, choices: Collection[str]) -> str:
    """The one of `choices` that a short name of a dtype stands for; `name` itself if it stands for none."""
    full = SHORT_NAMES.get(name, name)
    return full if name not in choices and full in choices else name
