from tests.families.cases.qwen3_5_text import CASES as DENSE
from tests.families.cases.qwen3_5_text import ZERO_CENTRED as ZERO_CENTRED

CONFIG, MODEL = "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"
_MOE = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=20)
CASES = {name.replace("qwen3_5_text", "qwen3_5_moe_text"): dict(keys, **_MOE) for name, keys in DENSE.items()}
