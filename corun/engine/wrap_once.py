"""Wraps functions of vLLM in place, each wrapper once, however often its seam is installed."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

_MARKS = "__corun_wrapped_by__"


def wrap_once(owner: Any, name: str, make: Callable[[Callable], Callable]) -> None:
    """Replace the function `name` of `owner` (a class or a module) by ``make(function)``.

    Does nothing where `make`, a function at a module's top level, has done so before. Several
    seams may wrap one function: each leaves a mark of its own.
    """
    found = inspect.getattr_static(owner, name)
    original = found.__func__ if isinstance(found, classmethod) else found
    mark = f"{make.__module__}.{make.__qualname__}"
    marks = getattr(original, _MARKS, ())
    if mark in marks:
        return
    # `wraps` copies attributes, so the outermost wrapper has the marks of all that it wraps.
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, _MARKS, (*marks, mark))
    setattr(owner, name, classmethod(wrapper) if isinstance(found, classmethod) else wrapper)
