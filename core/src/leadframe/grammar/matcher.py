"""llguidance's matchers: with what limits they are made, and on which stack."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from leadframe.grammar.vocabulary import library

T = TypeVar("T")

STACK_BYTES: Final = 256 << 20
"""The library recurses once for each rule that a rule leads to, and 64 KiB hold 10,000 of them;
of this memory only what is touched is real."""
_MAX_LEXER_STATES: Final = 50_000
"""Of some 0.3 KB each."""
_LIMITS: Final = {
    "initial_lexer_fuel": 1_000_000,
    "max_grammar_size": 500_000,
    # What one mask may take, 10 to 40 ms each: matchers work in the engine's thread.
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
}


def new_matcher(tokens: Any, lark: str) -> Any:
    """Compiles a Lark grammar for llguidance's tokenizer; `get_error` says what is wrong with it.

    Call it `on_deep_stack`. Some grammars end the process, and some take for ever.
    """
    llguidance = library()
    limits = llguidance.LLParserLimits(
        max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False, **_LIMITS
    )
    return llguidance.LLMatcher(tokens, lark, log_level=0, limits=limits)


def on_deep_stack(fn: Callable[[], T]) -> T:
    """Calls a function in a thread whose stack holds what a hostile grammar makes of it."""
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(fn())
        except BaseException as error:
            errors.append(error)

    # A daemon, so that a process that ends does not wait for a compilation.
    thread = threading.Thread(target=call, name="leadframe-grammar-stack", daemon=True)
    with _STACK_SIZE:
        usual = threading.stack_size(STACK_BYTES)
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
