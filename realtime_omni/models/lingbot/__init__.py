"""LingBot-World v2, causal: a camera-steered world model of the Wan family."""
