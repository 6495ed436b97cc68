"""pi0 and pi0.5 (Physical Intelligence): PaliGemma, an action expert beside it, flow matching."""
