"""Reading recorded JSON strictly: a missing or ill-typed field is an error that names the file."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class RecordError(ValueError):
    """A recorded file that cannot be used: foreign, damaged, or not comparable with another."""


class Fields:
    """The fields of one JSON object. Each reader raises RecordError where the value is another."""

    def __init__(self, given: Any, where: str) -> None:
        if not isinstance(given, Mapping):
            raise RecordError(f"{where} is damaged: a JSON object is expected, not {_brief(given)}")
        self.given: Mapping[str, Any] = given
        self.where = where

    def bad(self, name: str, expected: str) -> RecordError:
        """The error that says what `name` should have been."""
        held = _brief(self.given[name]) if name in self.given else "nothing"
        return RecordError(f"{self.where} is damaged: {name} should be {expected}, not {held}")

    def require_format(self, expected: str) -> None:
        """RecordError unless the file is of this format."""
        if self.given.get("format") != expected:
            raise self.bad("format", expected)

    def text(self, name: str) -> str:
        """A string that is not empty."""
        value = self.given.get(name)
        if not isinstance(value, str) or not value:
            raise self.bad(name, "a text")
        return value

    def optional_text(self, name: str) -> str | None:
        """A string, or None where the file says null. The field itself must be there."""
        if name in self.given and self.given[name] is None:
            return None
        return self.text(name)

    def count(self, name: str) -> int:
        """An integer of 0 or more."""
        value = self.given.get(name)
        if not is_count(value):
            raise self.bad(name, "a count")
        assert isinstance(value, int)
        return value

    def number(self, name: str) -> float:
        """A finite number of 0 or more."""
        value = self.given.get(name)
        if not is_number(value):
            raise self.bad(name, "a number of 0 or more")
        assert isinstance(value, int | float)
        return float(value)

    def object(self, name: str) -> dict[str, Any]:
        """A JSON object."""
        value = self.given.get(name)
        if not isinstance(value, Mapping):
            raise self.bad(name, "a JSON object")
        return dict(value)

    def items(self, name: str, read: Callable[["Fields"], T]) -> tuple[T, ...]:
        """A list of JSON objects, at least one, each turned into a value by `read`."""
        value = self.given.get(name)
        if not isinstance(value, list) or not value:
            raise self.bad(name, "a list that is not empty")
        return tuple(read(Fields(v, f"{self.where}, {name}[{i}],")) for i, v in enumerate(value))

    def column(self, name: str, fits: Callable[[Any], bool]) -> tuple[Any, ...]:
        """A list whose every value `fits`."""
        value = self.given.get(name)
        if not isinstance(value, list):
            raise self.bad(name, "a list")
        for i, v in enumerate(value):
            if not fits(v):
                raise RecordError(f"{self.where} is damaged: {name}[{i}] is {_brief(v)}")
        return tuple(value)


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value >= 0


def is_count(value: Any) -> bool:
    """Whether a JSON value is an integer of 0 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read_json(path: Path) -> Fields:
    """The JSON object in a file. RecordError where it is unreadable, cut off, or no object."""
    try:
        given = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise RecordError(f"{path} cannot be read ({e}); delete it and run again") from e
    return Fields(given, str(path))


def _brief(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:40] + "..."
