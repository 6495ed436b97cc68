"""Saved sessions: what a snapshot holds, and the file it is kept in.

``header`` is the versioned JSON part, ``file`` the safetensors container with its checksum, ``snapshot`` the value that a
caller holds. None of them knows an engine or a model: the engine fills a snapshot and reads it back.
"""
