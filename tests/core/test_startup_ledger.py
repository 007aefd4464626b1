"""The start-up ledger: phases are timed apart, and table, JSON and gauges agree."""

import json

import pytest

from leadframe.metrics import PHASES, EngineMetrics, StartupLedger
from leadframe.metrics.ledger import format_bytes


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves by hand."""
    now = [0.0]
    monkeypatch.setattr("leadframe.metrics.ledger.time.perf_counter", lambda: now[0])
    return now


@pytest.fixture
def ledger(clock):
    ledger = StartupLedger()
    with ledger.phase("load") as load:
        clock[0] += 2.0
        load.bytes = 300_000_000
    ledger.record("compile", 1.5, label="T=16", cache_hit=True)
    ledger.record("compile", 2.5, label="T=32", cache_hit=False)
    ledger.record("kv", 0.25, bytes=1 << 30)
    return ledger


def test_a_phase_measures_its_block_and_adds_up(clock):
    ledger = StartupLedger()
    for seconds in (1.0, 2.0):
        with ledger.phase("import"):
            clock[0] += seconds
    assert ledger["import"].seconds == 3.0
    assert ledger.total_seconds == 3.0


def test_a_phase_that_raises_is_still_timed(clock):
    ledger = StartupLedger()

    def fail():
        with ledger.phase("load"):
            clock[0] += 4.0
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert ledger["load"].seconds == 4.0


def test_an_unknown_phase_is_refused():
    with pytest.raises(KeyError), StartupLedger().phase("warmup"):
        pass


def test_details_of_a_block_do_not_count_twice(clock):
    ledger = StartupLedger()
    with ledger.phase("capture") as capture:
        clock[0] += 1.0
        capture.detail("T=8", seconds=0.6, bytes=100)
    assert ledger["capture"].seconds == 1.0
    assert ledger["capture"].bytes == 0


def test_the_table_shows_every_phase_with_figures(ledger):
    table = ledger.table()
    lines = {line.split()[0]: line for line in table.splitlines()}
    assert [*lines] == ["start-up", *PHASES, "total"]
    assert "2.00" in lines["load"]
    assert "286.10 MiB" in lines["load"]
    assert "150 MB/s" in lines["load"]
    assert "4.00" in lines["compile"]
    assert "2 buckets; cache: 1 hit, 1 missed" in lines["compile"]
    assert "1.00 GiB" in lines["kv"]
    assert "6.25" in lines["total"]


def test_json_has_stable_keys_and_survives_a_round_trip(ledger):
    data = json.loads(json.dumps(ledger.to_json()))
    assert set(data) == {"total_seconds", "phases"}
    assert [phase["name"] for phase in data["phases"]] == list(PHASES)
    compile_phase = data["phases"][3]
    assert set(compile_phase) == {"name", "seconds", "bytes", "details", "note"}
    assert compile_phase["details"][1] == {
        "label": "T=32", "seconds": 2.5, "bytes": 0, "cache_hit": False,
    }  # fmt: skip


def test_the_ledger_is_exported_as_gauges(ledger):
    text = EngineMetrics("m", ledger).render().decode()
    assert 'leadframe_startup_seconds{model_name="m",phase="load"} 2.0' in text
    assert 'leadframe_startup_bytes{model_name="m",phase="kv"} 1.073741824e+09' in text
    assert 'leadframe_startup_compile_cache{model_name="m",result="hit"} 1.0' in text
    assert 'leadframe_startup_compile_cache{model_name="m",result="miss"} 1.0' in text
    assert 'leadframe_startup_compile_cache{model_name="m",result="none"} 0.0' in text


def test_a_note_ends_the_line(clock):
    ledger = StartupLedger()
    ledger["compile"].note = "/cache/steps"
    assert ledger.table().splitlines()[4].endswith("/cache/steps")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1 << 30, "1.00 GiB"),
        (1 << 50, "1024.00 TiB"),
    ],
)
def test_sizes_read_as_binary_units(size, text):
    assert format_bytes(size) == text
