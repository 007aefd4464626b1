"""Compiles constraints, within limits, and remembers the last ones."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any, Final, TypeVar

import numpy as np

from leadframe.errors import RequestError
from leadframe.grammar.constraint import GrammarConstraint, words_of
from leadframe.grammar.vocabulary import Vocabulary, build_tokens, library
from leadframe.structured_outputs import Kind, StructuredOutputs

T = TypeVar("T")

_MAX_COMPILED: Final = 32
_STACK_BYTES: Final = 256 << 20
"""The library recurses once for each rule that a rule leads to, and 64 KiB hold 10,000 of them;
of this memory only what is touched is real."""
_MAX_LEXER_STATES: Final = 50_000
"""Of some 0.3 KB each."""
_WHITESPACE: Final = r" |\n[ \t]{0,20}"
"""Between JSON's tokens: a space, or a new line and its indentation. Without a bound, a model that
cannot decide writes blanks for ever."""
_OPTIONS: Final = '%llguidance {"no_forcing": true}'
"""Any spelling of a text is allowed, not only the one that the tokenizer would choose."""


class GrammarCompiler:
    """Makes constraints for the requests of one model. Safe to use from several threads.

    Args:
      vocabulary: the model's tokenizer; None where there is none.
      vocab_size: width of the logits.
      eos_token_ids: tokens that end an output where the grammar lets it end.
    """

    def __init__(
        self, vocabulary: Vocabulary | None, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        self._vocabulary, self._vocab_size = vocabulary, vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._inside = self._ends = self._none = np.zeros(0, np.int32)
        self._lock, self._build_lock = threading.Lock(), threading.Lock()
        self._compiled: OrderedDict[tuple[Kind, str], Any] = OrderedDict()
        self._tokens: Any = None

    def known(self, wanted: StructuredOutputs, *, ignore_eos: bool) -> GrammarConstraint | None:
        """Returns a constraint if it can be made in microseconds."""
        with self._lock:
            key = (wanted.kind, wanted.text)
            matcher = self._compiled.get(key)
            if matcher is None:
                return None
            self._compiled.move_to_end(key)
            return self._constraint(matcher.deep_copy(), wanted, ignore_eos)

    def compile(self, wanted: StructuredOutputs, *, ignore_eos: bool = False) -> GrammarConstraint:
        """Compiles a constraint: a millisecond as a rule, 0.3 s at worst.

        Args:
          wanted: the constraint.
          ignore_eos: end-of-sequence is allowed only where nothing else is.

        Raises:
          RequestError: it is malformed, too large, or matches nothing.
        """
        constraint = self.known(wanted, ignore_eos=ignore_eos)
        if constraint is not None:
            return constraint
        matcher = _on_deep_stack(lambda: self._matcher(wanted))
        self._check(matcher, wanted)
        with self._lock:
            self._compiled[wanted.kind, wanted.text] = matcher
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
            return self._constraint(matcher.deep_copy(), wanted, ignore_eos)

    def _constraint(
        self, matcher: Any, wanted: StructuredOutputs, ignore_eos: bool
    ) -> GrammarConstraint:
        return GrammarConstraint(
            matcher,
            lambda: self._renew(wanted),
            -(-self._vocab_size // 32),
            self._inside,
            self._ends if ignore_eos else self._none,
        )

    def _renew(self, wanted: StructuredOutputs) -> Any:
        """Compiles again, and forgets the matcher whose lexer may be full."""
        with self._lock:
            self._compiled.pop((wanted.kind, wanted.text), None)
        return _on_deep_stack(lambda: self._matcher(wanted))

    def _matcher(self, wanted: StructuredOutputs) -> Any:
        try:
            llguidance, tokens = library(), self._library_tokens()
        except RequestError as error:
            error.param = wanted.param
            raise
        limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        return llguidance.LLMatcher(tokens, _lark(wanted), log_level=0, limits=limits)

    def _library_tokens(self) -> Any:
        with self._build_lock:
            if self._tokens is None:
                if self._vocabulary is None:
                    raise RequestError("structured output needs a tokenizer; this model has none")
                tokens = build_tokens(self._vocabulary, self._vocab_size, self._eos_token_ids)
                num_words = -(-tokens.vocab_size // 32)
                self._inside = words_of(range(self._vocab_size), num_words)
                self._ends = words_of(self._eos_token_ids, num_words)
                self._none = np.zeros(num_words, np.int32)
                self._tokens = tokens
            return self._tokens

    def _check(self, matcher: Any, wanted: StructuredOutputs) -> None:
        """Refuses what did not compile, and what no output can match."""
        text = matcher.get_error()
        if not text:
            probe = self._constraint(matcher.deep_copy(), wanted, ignore_eos=False)
            probe.mask()
            if probe.error is None:
                return
            text = "nothing can match it"
        raise RequestError(
            f"{wanted.param} has a {wanted.kind} that cannot be used: {_shortened(text)}",
            param=wanted.param,
        )


def _lark(wanted: StructuredOutputs) -> str:
    """Writes a constraint as a Lark grammar."""
    if wanted.kind == "grammar":  # the options come last, so that lines keep their numbers
        return f"{wanted.text}\n{_OPTIONS}\n"
    if wanted.kind == "choice":
        start = " | ".join(json.dumps(choice) for choice in json.loads(wanted.text))
    elif wanted.kind == "regex":
        start = f"/{library().regex_to_lark(wanted.text, 'd')}/"
    else:
        schema = json.loads(wanted.text)
        schema["x-guidance"] = {"whitespace_pattern": _WHITESPACE}
        start = f"%json {json.dumps(schema)}"
    return f"start: {start}\n{_OPTIONS}\n"


def _shortened(text: str) -> str:
    """The first lines of the library's message, without the grammar that it quotes."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [line for line in lines if not (line[0].isdigit() and " | " in line) and line != "^"]
    return "; ".join(kept)[:300]


def _on_deep_stack(fn: Callable[[], T]) -> T:
    """Calls a function in a thread whose stack holds what a hostile grammar makes of it."""
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(fn())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="leadframe-grammar-stack")
    with _STACK_SIZE:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


_STACK_SIZE: Final = threading.Lock()
"""Held while the size for new threads, which is one for the process, is another one."""
