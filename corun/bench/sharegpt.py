"""Requests from conversations in ShareGPT's JSON format."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Tokenize = Callable[[str], Sequence[int]]
"""Text to token ids, by the model's tokenizer."""

_ASKS, _ANSWERS = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard")


@dataclass(frozen=True, slots=True)
class Conversations:
    """The prompts' token ids, the answers' lengths in tokens, and where they come from."""

    prompts: tuple[tuple[int, ...], ...]
    n_out: tuple[int, ...]
    source: str


def read(
    path: str | os.PathLike[str], count: int, rng: np.random.Generator, tokenize: Tokenize
) -> Conversations:
    """Draw `count` conversations without replacement: first question in, first answer's length out.

    path: a JSON list of {"conversations": [{"from": "human", "value": text}, {"from": "gpt", ..},
    ..]}. Conversations that do not begin with a question and an answer, or where one of the two
    has no token, are passed over and counted in the source. Raises ValueError for a file that
    cannot be read or holds too few.
    """
    name = os.path.basename(path)
    entries = _load(path)
    prompts: list[tuple[int, ...]] = []
    n_out: list[int] = []
    seen = 0
    for at in rng.permutation(len(entries)).tolist():
        if len(prompts) == count:
            break
        seen += 1
        pair = _first_exchange(entries[at])
        if pair is None:
            continue
        question, answer = (tuple(int(token) for token in tokenize(text)) for text in pair)
        if question and answer:
            prompts.append(question)
            n_out.append(len(answer))
    if len(prompts) < count:
        raise ValueError(
            f"{name} holds {len(prompts)} usable conversations among {len(entries)} (a question "
            f"from 'human', then an answer from 'gpt', both not empty), too few for {count}; ask "
            "for fewer requests, or give a larger file"
        )
    return Conversations(
        tuple(prompts),
        tuple(n_out),
        f"ShareGPT conversations of {name}: the first question in, the first answer's length out; "
        f"{count} drawn without replacement, {seen - count} passed over as unusable",
    )


def _load(path: str | os.PathLike[str]) -> list[Any]:
    try:
        with open(path, encoding="utf-8") as file:
            entries = json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot read the conversations of {os.fspath(path)}: {error}; give the path of a "
            "JSON file in ShareGPT's format"
        ) from error
    if not isinstance(entries, list):
        raise ValueError(
            f"{os.fspath(path)} is not in ShareGPT's format: it must hold a list of conversations"
        )
    return entries


def _first_exchange(entry: Any) -> tuple[str, str] | None:
    """The first question and answer, after a system turn where there is one; or None."""
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        return None
    said = [(t.get("from"), t.get("value")) for t in turns if isinstance(t, dict)]
    if said and said[0][0] == "system":
        said = said[1:]
    if len(said) < 2 or said[0][0] not in _ASKS or said[1][0] not in _ANSWERS:
        return None
    question, answer = said[0][1], said[1][1]
    if not isinstance(question, str) or not isinstance(answer, str):
        return None
    return question, answer
