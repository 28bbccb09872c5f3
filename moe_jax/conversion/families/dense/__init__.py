"""Families of dense models, and beside them their relatives with experts: Llama and Mixtral, Qwen3 and its MoE."""
