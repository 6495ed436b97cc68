"""A llama written once more, for parity: no pages, no fused matrices, rotation by complex numbers, one token's attention at a
time. It shares nothing with the code under test but the names of the weights."""

import torch


def dense_logits(config, tensors, tokens):
    """Logits [T, V] in float64 after each of the tokens [T]."""
    w = {name: value.double() for name, value in tensors.items()}
    d, group, kv = config.head_dim, config.heads // config.kv_heads, config.kv_heads * config.head_dim
    x = w["embedding"][tokens]
    freq = torch.tensor([config.rope_base ** (-2 * i / d) for i in range(d // 2)], dtype=torch.float64)
    turn = torch.polar(torch.ones(len(tokens), d // 2, dtype=torch.float64), torch.arange(len(tokens))[:, None] * freq)

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt() * weight

    def rotated(x):
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn[:, None]).flatten(
            -2
        )

    for i in range(config.layers):
        p = f"layers.{i}."
        y = norm(x, w[p + "norm1"])
        q_w, k_w, v_w = w[p + "qkv"].split([config.model, kv, kv])
        q, k, v = (
            rotated((y @ m.T).unflatten(-1, (-1, d))) if r else (y @ m.T).unflatten(-1, (-1, d))
            for m, r in ((q_w, True), (k_w, True), (v_w, False))
        )
        out = torch.zeros_like(q)
        for t in range(len(tokens)):
            for h in range(config.heads):
                score = k[: t + 1, h // group] @ q[t, h] / d**0.5
                out[t, h] = score.softmax(-1) @ v[: t + 1, h // group]
        x = x + out.flatten(-2) @ w[p + "out"].T
        y = norm(x, w[p + "norm2"])
        gate_w, up_w = w[p + "gate_up"].chunk(2)
        gate = y @ gate_w.T
        x = x + (gate * torch.sigmoid(gate) * (y @ up_w.T)) @ w[p + "down"].T
    return norm(x, w["norm"]) @ w["embedding"].T
