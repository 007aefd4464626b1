"""Grammars that bind what a request may say next. Built on llguidance, which is optional."""

from __future__ import annotations

from leadframe.grammar.compiler import GrammarCompiler
from leadframe.grammar.constraint import GrammarConstraint
from leadframe.grammar.vocabulary import Vocabulary

__all__ = ["GrammarCompiler", "GrammarConstraint", "Vocabulary"]
