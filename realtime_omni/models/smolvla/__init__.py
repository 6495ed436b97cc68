"""SmolVLA (Hugging Face): the first layers of SmolVLM2 and an action expert that alternates joint and cross attention."""
