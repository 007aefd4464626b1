"""Compiles constraints, within limits, and remembers the last ones."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import Any, Final

import numpy as np

from leadframe.errors import RequestError
from leadframe.grammar.constraint import GrammarConstraint, words_of
from leadframe.grammar.lark import cannot_use, lark_of
from leadframe.grammar.matcher import new_matcher, on_deep_stack
from leadframe.grammar.rehearsal import Rehearsal
from leadframe.grammar.vocabulary import TokenTable, Vocabulary, build_tokens, library, read_tokens
from leadframe.structured_outputs import Kind, StructuredOutputs

_MAX_COMPILED: Final = 32


class GrammarCompiler:
    """Makes constraints for the requests of one model. Safe to use from several threads.

    Args:
      vocabulary: the model's tokenizer; None where there is none.
      vocab_size: width of the logits.
      eos_token_ids: tokens that end an output where the grammar lets it end.
      rehearse: compile what is new in another process first, which may die of it; without, only
        for grammars of one's own.
    """

    def __init__(
        self,
        vocabulary: Vocabulary | None,
        vocab_size: int,
        eos_token_ids: Collection[int],
        *,
        rehearse: bool = True,
    ) -> None:
        self._vocabulary, self._vocab_size = vocabulary, vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._inside = self._ends = self._none = np.zeros(0, np.int32)
        self._lock, self._build_lock = threading.Lock(), threading.Lock()
        self._compiled: OrderedDict[tuple[Kind, str], Any] = OrderedDict()
        self._table: TokenTable | None = None
        self._tokens: Any = None
        self._rehearsal = Rehearsal(self._read_table) if rehearse else None

    def close(self) -> None:
        """Ends the other process, also while it compiles; callable more than once."""
        if self._rehearsal is not None:
            self._rehearsal.close()

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
        """Compiles a constraint: milliseconds as a rule, some seconds at worst, of which 1 s here.

        Args:
          wanted: the constraint.
          ignore_eos: end-of-sequence is allowed only where nothing else is.

        Raises:
          RequestError: it is malformed, too large, or matches nothing.
          EngineDead: `close` was called.
        """
        constraint = self.known(wanted, ignore_eos=ignore_eos)
        if constraint is not None:
            return constraint
        lark = self._lark(wanted)
        problem = self._rehearsal.problem(lark) if self._rehearsal is not None else None
        if problem is not None:
            raise cannot_use(wanted, problem)
        matcher = on_deep_stack(lambda: new_matcher(self._tokens, lark))
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
        return on_deep_stack(lambda: new_matcher(self._tokens, lark_of(wanted)))

    def _lark(self, wanted: StructuredOutputs) -> str:
        """Writes a grammar, once there is what compiles it."""
        try:
            library()
            self._build_tokens()
        except RequestError as error:
            error.param = wanted.param
            raise
        return lark_of(wanted)

    def _build_tokens(self) -> None:
        with self._build_lock:
            if self._tokens is None:
                table = self._read_table()
                tokens = build_tokens(table)
                num_words = -(-tokens.vocab_size // 32)
                self._inside = words_of(range(self._vocab_size), num_words)
                self._ends = words_of(self._eos_token_ids, num_words)
                self._none = np.zeros(num_words, np.int32)
                self._tokens = tokens

    def _read_table(self) -> TokenTable:
        if self._table is None:
            if self._vocabulary is None:
                raise RequestError("structured output needs a tokenizer; this model has none")
            self._table = read_tokens(self._vocabulary, self._vocab_size, self._eos_token_ids)
        return self._table

    def _check(self, matcher: Any, wanted: StructuredOutputs) -> None:
        """Refuses what did not compile, and what no output can match."""
        text = matcher.get_error()
        if not text:
            probe = self._constraint(matcher.deep_copy(), wanted, ignore_eos=False)
            probe.mask()
            if probe.error is None:
                return
            text = "nothing can match it"
        raise cannot_use(wanted, text)
