"""What a start says of itself: its first seconds, an interpreter, a pool that is capped."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import replace

import pytest

from leadframe.engine import startup


@pytest.fixture
def slow_interpreter(monkeypatch):
    """The reference backend, as one that interprets kernels and is slow to create."""
    create = startup.create_backend

    def slow(*args):
        backend = create(*args)
        time.sleep(0.1)
        backend.caps = replace(backend.caps, simulated="interpreter")
        return backend

    monkeypatch.setattr(startup, "create_backend", slow)


def test_creating_the_backend_is_told_apart(tiny_llm, slow_interpreter):
    phase = tiny_llm().engine.ledger["import"]
    said = re.match(r"(\d+\.\d\d) s for the backend and the kernels that it builds", phase.note)
    assert said is not None
    assert 0.1 <= float(said[1]) <= phase.seconds + 0.01


def test_an_interpreter_is_announced_once(tiny_llm, slow_interpreter, caplog):
    tiny_llm()
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert line.startswith("reference:0 interprets its kernels on the host, hundreds of times")
    assert "tests only" in line


def test_a_device_that_computes_is_not_announced(tiny_llm, caplog):
    tiny_llm()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_pool_that_is_capped_says_why(tiny_llm):
    capped = tiny_llm(num_blocks_override=None, max_num_seqs=3, max_model_len=32).engine
    assert capped.parts.kv_plan.capacity.num_usable_blocks == 2 * 3 * 8
    note = "capped: 3 requests (--max-num-seqs) of 32 tokens, twice over, need no more"
    assert note in capped.ledger.table()
    assert "capped" not in tiny_llm().engine.ledger.table()
