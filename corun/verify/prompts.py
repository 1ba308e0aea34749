"""Prompts of an exact token length: varied English from a seeded generator, or random token ids.

Nothing is read from a file, so a verification is reproducible from its seed alone. Models without a
tokenizer (a directory with only config.json) get random token ids.
"""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, Protocol

_WHO = (
    "the night train driver",
    "a retired chemist",
    "our neighbor's daughter",
    "the town librarian",
    "an impatient violinist",
    "the lighthouse keeper",
    "a visiting geologist",
    "the baker's apprentice",
    "a careful accountant",
    "the deputy mayor",
    "two exhausted hikers",
    "the museum's night guard",
    "a beekeeper from the valley",
    "the youngest programmer on the team",
    "an old ferry captain",
)
_DID = (
    "measured",
    "wrote down",
    "misplaced",
    "explained",
    "repaired",
    "borrowed",
    "described",
    "counted",
    "photographed",
    "translated",
    "argued about",
    "remembered",
    "weighed",
    "catalogued",
    "forgot",
)
_WHAT = (
    "the temperature of the river",
    "seventeen brass keys",
    "a map of the old quarter",
    "the recipe for rye bread",
    "the minutes of the last meeting",
    "a telescope with a cracked lens",
    "the train timetable of 1954",
    "three letters from Lisbon",
    "the invoice for the new roof",
    "an unfinished proof about primes",
    "the tide tables",
    "a jar of dark honey",
    "the source code of the ticket machine",
    "a grammar of a dead language",
    "the weather log",
)
_WHEN = (
    "before the storm reached the coast",
    "at exactly 6:40 in the morning",
    "during the second interval",
    "while the kettle boiled",
    "three days after the election",
    "in the winter of the long strike",
    "because nobody else would",
    "without telling anyone",
    "for the 128th time",
    "as the instructions required",
    "although the light was poor",
    "once the crowd had gone home",
)
_ASK = (
    "Explain why this mattered.",
    "What happened next?",
    "List three consequences.",
    "Summarize the story so far.",
    "Write the next paragraph.",
    "Who is telling the truth?",
    "Turn this into a short poem.",
    "Give a careful estimate and say how you made it.",
    "What would a skeptic answer?",
    "Continue in the same style.",
    "Name the main character.",
)


class PromptSource(Protocol):
    """Makes prompts of an exact length in tokens."""

    vocab_size: int

    def prompt(self, key: str, tokens: int) -> tuple[int, ...]:
        """`tokens` token ids; the same for the same key, different for different keys."""

    def question(self, key: str) -> tuple[int, ...]:
        """A short prompt of natural length, as a chat turn where the model has a chat template."""


def sentences(rng: Random) -> Iterator[str]:
    """Endless varied sentences."""
    while True:
        who, did, what, when = (rng.choice(words) for words in (_WHO, _DID, _WHAT, _WHEN))
        yield f"{who[0].upper()}{who[1:]} {did} {what} {when}."
        if rng.random() < 0.25:
            a, b = rng.randrange(2, 900), rng.randrange(2, 90)
            yield f"The sum came to {a * b}, that is {a} times {b}."


def question(rng: Random) -> str:
    """A few sentences and something to do about them."""
    source = sentences(rng)
    told = " ".join(next(source) for _ in range(rng.randrange(1, 5)))
    return f"{told} {rng.choice(_ASK)}"


class TextPrompts:
    """Natural text through a tokenizer (any with ``encode``; a chat template where it has one)."""

    def __init__(self, tokenizer: Any, vocab_size: int, seed: int) -> None:
        self.tokenizer, self.vocab_size, self.seed = tokenizer, vocab_size, seed

    def prompt(self, key: str, tokens: int) -> tuple[int, ...]:
        """See PromptSource."""
        source = sentences(Random(f"{self.seed}:{key}"))
        text, ids = "", list[int]()
        while len(ids) < tokens:
            # Tokenize in big bites: one call a sentence would be quadratic in the prompt's length.
            text += " ".join(next(source) for _ in range(1 + tokens // 16)) + "\n"
            ids = self.tokenizer.encode(text)
        return tuple(ids[:tokens])

    def question(self, key: str) -> tuple[int, ...]:
        """See PromptSource."""
        text = question(Random(f"{self.seed}:{key}"))
        if getattr(self.tokenizer, "chat_template", None) is None:
            return tuple(self.tokenizer.encode(text))
        rendered = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        return tuple(self.tokenizer.encode(rendered, add_special_tokens=False))


class RandomPrompts:
    """Random token ids below `vocab_size`, for models without a tokenizer."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.vocab_size, self.seed = vocab_size, seed

    def prompt(self, key: str, tokens: int) -> tuple[int, ...]:
        """See PromptSource."""
        rng = Random(f"{self.seed}:{key}")
        return tuple(rng.randrange(self.vocab_size) for _ in range(tokens))

    def question(self, key: str) -> tuple[int, ...]:
        """See PromptSource; 16 to 64 tokens."""
        return self.prompt(key, Random(f"{self.seed}:{key}:length").randrange(16, 65))


def words_of(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of `tokens`; without a tokenizer, the ids themselves."""
    if tokenizer is None:
        return " ".join(f"<{token}>" for token in tokens)
    return str(tokenizer.decode(list(tokens)))
