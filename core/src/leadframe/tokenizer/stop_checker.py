"""Finds stop strings in text that arrives in pieces, wherever the pieces break."""

from __future__ import annotations

from collections.abc import Sequence


class _Matcher:
    """How much of one stop string the text ends with (Knuth, Morris and Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = [0] * len(stop)
        length = 0
        for i in range(1, len(stop)):
            while length and stop[i] != stop[length]:
                length = self._fallback[length - 1]
            length += stop[i] == stop[length]
            self._fallback[i] = length

    def advance(self, char: str) -> bool:
        """Takes one character; whether the text now ends with the whole stop string."""
        while self.matched and char != self.stop[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += char == self.stop[self.matched]
        if self.matched < len(self.stop):
            return False
        self.matched = self._fallback[-1]
        return True


class StopChecker:
    """The stop strings of one request.

    The first stop string to be complete ends the text; of two that end at the same character,
    the longer one. So the result is the same however the text is cut into pieces. Text that may
    still be the beginning of a stop string is held back, and no more than that.

    Args:
      stop: non-empty strings.
      include: whether the text ends with the stop string or just before it.
    """

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        self._matchers = [_Matcher(text) for text in stop]
        self._include = include
        self._first_chars = {text[0] for text in stop}
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Takes the next text.

        Args:
          text: what comes next.
          armed: whether a stop string that ends in this text counts.

        Returns:
          The text that is now final, and the stop string that ended it, if one did. After that
          nothing may be pushed.
        """
        if not self._held and self._first_chars.isdisjoint(text):
            return text, None
        buffer = self._held + text
        for end in range(len(self._held) + 1, len(buffer) + 1):
            complete = [m.stop for m in self._matchers if m.advance(buffer[end - 1])]
            if complete and armed:
                stop = max(complete, key=len)
                self._held = ""
                return buffer[: end if self._include else end - len(stop)], stop
        keep = max(matcher.matched for matcher in self._matchers)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        """Ends the text without a match and returns what was held back."""
        held, self._held = self._held, ""
        return held
