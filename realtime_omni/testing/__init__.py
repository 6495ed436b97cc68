"""Test tools that ship with the package: an engine without a thread, faults, a model to test with, the model check.

Nothing here imports torch until a module of it is imported.
"""
