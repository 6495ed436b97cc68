"""What checkpoints of vision-language-action policies call their tensors: rules for the names of ``models.common.weights``."""

from __future__ import annotations

TRANSFORMER_RULES = (
    (r"\.embeddings\.patch_embedding\.", ".patch."),
    (r"\.embeddings\.position_embedding\.", ".position."),
    (r"\.encoder\.layers\.", ".layers."),
    (r"\.(layer_norm1|input_layernorm)\.", ".attn_norm."),
    (r"\.(layer_norm2|post_attention_layernorm)\.", ".mlp_norm."),
    (r"\.self_attn\.([qkvo])(ut)?_proj\.", r".\1."),
    (r"\.mlp\.(gate|up|down)_proj\.", r".\1."),
    (r"\.mlp\.fc1\.", ".up."),
    (r"\.mlp\.fc2\.", ".down."),
    (r"\.post_layernorm\.", ".norm."),
)
"""Names of transformers' SigLIP, Gemma and Llama layers."""

PROJECTION_RULES = (
    (r"^action_in_proj\.", "action_in."),
    (r"^action_out_proj\.", "action_out."),
    (r"^state_proj\.", "state_in."),
    (r"^(action_)?time_mlp_(in|out)\.", r"time_\2."),
)
"""Names of the projections around the expert; pi0 and pi0.5 files use either name of the time MLP."""
