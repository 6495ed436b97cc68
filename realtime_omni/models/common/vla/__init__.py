"""Blocks that vision-language-action policies share: towers, prefix attention, flow loop, checkpoints.

Everything here is a pure function or a module without per-session state. A policy is a network that satisfies
``network.FlowNetwork``; what turns observations into its inputs and its outputs into robot units is in ``processing``.
"""
