"""Benchmarks: each validates its outputs before it reports a number."""
