"""Moshi and PersonaPlex: speech to speech, both sides of a call as streams of tokens, one step every 80 ms."""
