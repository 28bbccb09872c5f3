"""Conversion from and to foreign checkpoints: Hugging Face directories, GGUF files, and LoRA of the PEFT library."""

from moe_jax.convert.from_hugging_face import convert as convert
from moe_jax.convert.gguf_header import is_gguf as is_gguf
from moe_jax.convert.gguf_model import GGUFModel as GGUFModel
from moe_jax.convert.hf_config import read_hf_config as read_hf_config
from moe_jax.convert.hf_config import write_hf_config as write_hf_config
from moe_jax.convert.hugging_face_dir import HuggingFaceDirectory as HuggingFaceDirectory
from moe_jax.convert.hugging_face_dir import is_hugging_face_directory as is_hugging_face_directory
from moe_jax.convert.to_hugging_face import export as export
from moe_jax.convert.to_peft import export_peft as export_peft
