"""Building blocks of the Wan family of video models (arXiv 2503.20314), causal: what worlds on that base share."""
