"""Errors of code that a recipe names (a model, a vocoder), which may be the user's own, with whatever mistake."""

from __future__ import annotations

from pathlib import Path
from traceback import walk_tb


def told(error: Exception, module: str) -> str:
    """A caught error in one line: type, message, and the innermost line of the module's package that was reached, the lines of
    whoever caught it aside."""
    said = " ".join(str(error).split())
    told = f"{type(error).__name__}: {said}" if said else type(error).__name__
    if isinstance(error, SyntaxError):
        return told  # says itself where
    package = module.partition(".")[0]
    (caught, _), *raised = walk_tb(error.__traceback__)
    reached = [
        (frame, line)
        for frame, line in raised
        if frame.f_code.co_filename != caught.f_code.co_filename
        and str(frame.f_globals.get("__name__")).partition(".")[0] == package
    ]
    if not reached:
        return told
    frame, line = reached[-1]
    return f"{told} ({Path(frame.f_code.co_filename).name}, line {line})"
