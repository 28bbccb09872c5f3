"""Conversion from and to other libraries' formats: Hugging Face directories, GGUF files, and LoRA of PEFT.

Names are imported when they are first asked for: options are read without JAX.
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from moe_jax.conversion.from_hugging_face import convert as convert
    from moe_jax.conversion.gguf.gguf_header import is_gguf as is_gguf
    from moe_jax.conversion.gguf.gguf_model import GGUFModel as GGUFModel
    from moe_jax.conversion.hf_config import read_hf_config as read_hf_config
    from moe_jax.conversion.hf_config import write_hf_config as write_hf_config
    from moe_jax.conversion.hugging_face_dir import HuggingFaceDirectory as HuggingFaceDirectory
    from moe_jax.conversion.hugging_face_dir import is_hugging_face_directory as is_hugging_face_directory
    from moe_jax.conversion.spec import ConvertSpec as ConvertSpec
    from moe_jax.conversion.spec import ExportSpec as ExportSpec
    from moe_jax.conversion.to_hugging_face import export as export
    from moe_jax.conversion.to_peft import export_peft as export_peft
