"""What a start says of itself: its first seconds, an interpreter, a pool that is capped."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from leadframe.config import EngineConfig
from leadframe.engine import startup
from leadframe.engine.kv_sizing import KVSizer
from leadframe.metrics import StartupLedger
from leadframe.platform import KVSpec
from leadframe.platform.reference.backend import ReferenceBackend


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


def sizer_for(is_static, **runner):
    backend = ReferenceBackend()
    stub = SimpleNamespace(
        caps=replace(backend.caps, static_shapes=is_static),
        memory=backend.memory,
        kv_block_bytes=lambda spec: 1024,
    )
    info = SimpleNamespace(max_position_embeddings=4096)
    spec = KVSpec((), 16, "float32")
    running = SimpleNamespace(backend=stub, **runner)
    return KVSizer(EngineConfig("none"), running, spec, info, StartupLedger(), "test")


@pytest.mark.parametrize("is_static", [True, False])
def test_the_step_that_is_measured_has_the_head_that_takes_most(is_static):
    measured = []
    nothing = {"allocate": lambda *args: None, "release": lambda: None}
    sizer_for(is_static, profile=measured.append, **nothing)._profile()
    assert [bucket.sample for bucket in measured] == ["sort"]


@pytest.mark.parametrize(("is_static", "sizes"), [(True, {1000}), (False, {1000, 1003})])
def test_a_pool_that_steps_are_compiled_for_is_the_same_at_the_next_start(is_static, sizes):
    sizer = sizer_for(is_static)
    assert {sizer._plan(1024 * blocks, 0).num_blocks for blocks in (1000, 1003)} == sizes
