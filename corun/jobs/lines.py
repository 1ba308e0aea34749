"""The input of ``corun generate``: one JSON object a line. Pure Python.

Each object has exactly one of ``prompt`` (a string), ``prompt_token_ids`` (a list of integers) and
``messages`` (a chat, a list of {"role", "content"}); optionally ``id`` (a string or an integer),
``chat_template_kwargs`` beside ``messages``, and sampling parameters, either in ``params`` or at
the top level. Any other key is an error. Error messages never quote a prompt.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from corun.jobs.params import PARAMETERS, checked, token_ids

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
OTHER_KEYS = ("id", "params", "chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class Job:
    """One line to answer. index: from 0. kind: which of PROMPT_KEYS `prompt` is."""

    index: int
    id: str | int | None
    kind: str
    prompt: Any
    params: dict[str, Any]
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BadLine:
    """One line that cannot be answered, and why. index: from 0; people see ``index + 1``."""

    index: int
    id: str | int | None
    reason: str

    def __str__(self) -> str:
        return f"line {self.index + 1}: {self.reason}"


def _check_messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError("'messages' must be a list of at least one message")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError("each of 'messages' must be an object with a 'role'")
        if not isinstance(message.get("content"), str | list):
            raise ValueError("each of 'messages' must have a 'content' (a string, or text parts)")
    return value


def _check_prompt(kind: str, value: Any) -> Any:
    if kind == "messages":
        return _check_messages(value)
    if kind == "prompt":
        if not isinstance(value, str) or not value:
            raise ValueError("'prompt' must be a string, not empty")
        return value
    try:
        ids = token_ids(value)
    except ValueError as e:
        raise ValueError(f"'prompt_token_ids' must be {e}") from None
    if not ids:
        raise ValueError("'prompt_token_ids' is empty")
    return ids


def _parameters(line: Mapping[str, Any]) -> dict[str, Any]:
    nested = line.get("params")
    if nested is None:
        nested = {}
    if not isinstance(nested, dict):
        raise ValueError("'params' must be an object of sampling parameters")
    top = {k: v for k, v in line.items() if k in PARAMETERS}
    twice = sorted(set(top) & set(nested))
    if twice:
        raise ValueError(f"{', '.join(map(repr, twice))} given both at the top and in 'params'")
    return checked({**top, **nested})


def _line_id(line: Any) -> str | int | None:
    """The line's id where it has a usable one, for error records too."""
    value = line.get("id") if isinstance(line, dict) else None
    return value if isinstance(value, str | int) and not isinstance(value, bool) else None


def _job(index: int, line: Any, defaults: Mapping[str, Any]) -> Job:
    if not isinstance(line, dict):
        raise ValueError("not a JSON object")
    unknown = sorted(set(line) - set(PROMPT_KEYS) - set(OTHER_KEYS) - set(PARAMETERS))
    if unknown:
        raise ValueError(f"unknown key(s) {', '.join(map(repr, unknown))}")
    kinds = [k for k in PROMPT_KEYS if line.get(k) is not None]
    if len(kinds) != 1:
        found = f"has {' and '.join(map(repr, kinds))}" if kinds else "has none of them"
        raise ValueError(f"needs exactly one of {', '.join(map(repr, PROMPT_KEYS))}; it {found}")
    if line.get("id") is not None and _line_id(line) is None:
        raise ValueError("'id' must be a string or an integer")
    template = line.get("chat_template_kwargs")
    if template is not None and (not isinstance(template, dict) or kinds[0] != "messages"):
        raise ValueError("'chat_template_kwargs' must be an object, and needs 'messages'")
    return Job(
        index=index,
        id=_line_id(line),
        kind=kinds[0],
        prompt=_check_prompt(kinds[0], line[kinds[0]]),
        params={**defaults, **_parameters(line)},
        chat_template_kwargs=template or {},
    )


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def parse_line(index: int, text: str, defaults: Mapping[str, Any]) -> Job | BadLine:
    """The job in `text`, the line number `index` (from 0) of the input.

    defaults: checked sampling parameters, used where the line has none of its own.
    """
    if not text.strip():
        return BadLine(index, None, "empty")
    line = None
    try:
        line = json.loads(text, parse_constant=_no_constant)
        return _job(index, line, defaults)
    except json.JSONDecodeError as e:
        return BadLine(index, None, f"not JSON ({e.msg} at column {e.colno})")
    except RecursionError:
        return BadLine(index, None, "nested too deeply")
    except ValueError as e:
        return BadLine(index, _line_id(line), str(e))


def parse(data: bytes, defaults: Mapping[str, Any]) -> list[Job | BadLine]:
    """Every line of a JSONL file, in order; empty lines at its end do not count."""
    lines: Iterable[bytes] = data.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n \t").split(b"\n")
    result: list[Job | BadLine] = []
    for index, raw in enumerate(lines):
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            result.append(BadLine(index, None, "not UTF-8"))
        else:
            result.append(parse_line(index, text, defaults))
    return [] if not data.strip() else result
