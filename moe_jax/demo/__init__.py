"""Demos of all steps with the commands of a user: on a real language model, with an eye for it, and on a small one."""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):  # `python -m moe_jax.demo.small_world` runs one of its modules alone
    from moe_jax.demo.quick import run_quick_demo as run_quick_demo
    from moe_jax.demo.real import run_real_demo as run_real_demo
    from moe_jax.demo.seeing import run_vision_demo as run_vision_demo
