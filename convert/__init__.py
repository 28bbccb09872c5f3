"""Everything that knows a foreign checkpoint: Hugging Face directories in, Hugging Face directories out."""

from moe_jax.convert.exporting import export as export
from moe_jax.convert.hf_config import read_hf_config as read_hf_config
from moe_jax.convert.hf_config import write_hf_config as write_hf_config
from moe_jax.convert.importing import convert as convert
from moe_jax.convert.peft_export import export_peft as export_peft
from moe_jax.convert.source import HuggingFaceDirectory as HuggingFaceDirectory
from moe_jax.convert.source import is_hugging_face_directory as is_hugging_face_directory
