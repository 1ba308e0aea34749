"""The progress bar of a verification."""

import sys


class Bar:
    """A progress bar on stderr: requests done."""

    def __init__(self, title: str, total: int, shown: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            total=total, desc=title, unit="request", disable=not shown, file=sys.stderr, leave=False
        )

    def advance(self, _name: str) -> None:
        """One more request is done."""
        self._bar.update()

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
