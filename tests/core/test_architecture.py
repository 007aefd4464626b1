"""ARCHITECTURE.md stays true: its names exist, its files exist, its worked example runs."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import numpy as np
import pytest

import leadframe
from leadframe import SamplingParams
from leadframe.config import SchedulerConfig
from leadframe.kv_cache import KVCacheManager
from leadframe.platform.batch import unpack
from leadframe.platform.capabilities import Capabilities
from leadframe.request import Request
from leadframe.runner.batch_builder import BatchBuilder
from leadframe.runner.buckets import BucketPolicy
from leadframe.scheduler import Scheduler

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
CODE = set(re.findall(r"`([^`\n]+)`", TEXT))
MODULES = sorted(name for name in CODE if re.fullmatch(r"leadframe(\.\w+)+", name))
MEMBERS = sorted(name for name in CODE if re.fullmatch(r"_?[A-Z]\w+(\.\w+)?", name))
PATHS = sorted(name for name in CODE if re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?", name))
NOT_OURS = {"TID251"}


def _everything() -> dict[str, object]:
    found: dict[str, object] = {}
    for module in pkgutil.walk_packages(leadframe.__path__, "leadframe."):
        if "conformance.suite" in module.name or module.name.endswith("__main__"):
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            found.setdefault(name, value)
    return found


def test_the_page_is_short_enough_to_read() -> None:
    assert len(TEXT.splitlines()) <= 300


@pytest.mark.parametrize("name", MODULES)
def test_every_module_that_it_names_can_be_imported(name: str) -> None:
    assert importlib.import_module(name)


def test_every_class_and_member_that_it_names_exists() -> None:
    known = _everything()
    assert len(MEMBERS) > 10
    for name in MEMBERS:
        if name in NOT_OURS:
            continue
        owner, _, member = name.partition(".")
        assert owner in known, f"{owner} is named in ARCHITECTURE.md and exists nowhere"
        assert not member or hasattr(known[owner], member), name


@pytest.mark.parametrize("path", PATHS)
def test_every_path_that_it_names_exists(path: str) -> None:
    assert (ROOT / path).exists()


def _request(request_id: str, prompt: list[int], output: list[int]) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=20)
    request = Request(request_id, prompt, params, 0, frozenset(), len(prompt) + 20)
    request.output_token_ids += output
    return request


def test_the_worked_example_of_a_step() -> None:
    kv = KVCacheManager(16, 4, enable_prefix_caching=True)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64), kv, 64)
    policy = BucketPolicy(Capabilities("numpy"), 4, 64, 64, 4)
    builder = BatchBuilder(4, 4, policy)
    a = _request("A", list(range(10, 18)), [])
    scheduler.add(a)
    scheduler.update(scheduler.schedule(), [99])  # A's prompt is computed; it has 9 tokens now
    b = _request("B", [10, 11, 12, 13, 50, 51, 52], [])
    scheduler.add(b)
    step = scheduler.schedule()
    batch = builder.build(step).batch
    arrays = unpack(batch.bucket, batch.ints, batch.floats)
    first = kv.block_ids(a)[0]
    assert (kv.block_ids(a) - first).tolist() == [0, 1, 2]
    assert (kv.block_ids(b) - first).tolist() == [0, 3]
    assert first == 1
    assert (batch.bucket.num_tokens, batch.bucket.num_seqs) == (4, 2)
    assert (batch.bucket.num_decodes, batch.bucket.num_blocks) == (1, 3)
    expected = {
        "slots": [12, 16, 17, 18],
        "positions": [8, 4, 5, 6],
        "seq_lens": [9, 7],
        "query_start": [0, 1, 4],
        "logits_idx": [0, 3],
        "block_table": [[1, 2, 3], [1, 4, 0]],
        "token_ids": [99, 50, 51, 52],
    }
    for name, value in expected.items():
        assert np.array_equal(getattr(arrays, name), value), name
    scheduler.check()
