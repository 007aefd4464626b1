"""What the backend promises beyond the kit: placement, types, memory, errors, the cache."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from leadframe.errors import (
    CompileError,
    ConfigError,
    ContractViolation,
    DeviceLost,
    DeviceNotFound,
    DeviceOOM,
    Unsupported,
)
from leadframe.platform import Bucket, KVLayerSpec, KVSpec, Limits, OpSpec, Partition
from leadframe.platform.batch import StepBatch, packed_sizes
from leadframe_tpu.cache import default_folder
from leadframe_tpu.capabilities import why_not
from leadframe_tpu.create import _set_cache, create_backend
from leadframe_tpu.detect import INTERPRETED
from leadframe_tpu.failures import asked_bytes, compile_errors, device_errors
from leadframe_tpu.kernels.layout import lane_width
from leadframe_tpu.memory import ChipMemory, Ledger
from leadframe_tpu.namespace import jax_namespace
from leadframe_tpu.program import compile_lowered
from leadframe_tpu.ranks import Cut, Ranks

BUCKET = Bucket(1, 1, 1, 1, 1)


def make(**options):
    return create_backend(INTERPRETED, options, Limits())


# --- placement ----------------------------------------------------------------------------


class FakeRanks(Ranks):
    """A group of any size without devices."""

    def __init__(self, count):
        self._count = count

    @property
    def count(self):
        return self._count


HEADS = Partition(0, heads=2, unit=8)


@pytest.mark.parametrize(
    ("count", "partition", "wanted"),
    [
        (1, Partition(0), None),
        (4, Partition(), None),
        (4, None, None),
        (4, Partition(1), Cut(1, 1, 1)),
        (2, HEADS, Cut(0, 8, 1)),
        (4, HEADS, Cut(0, 8, 2)),
    ],
)
def test_cut(count, partition, wanted):
    assert FakeRanks(count).cut((16, 12), partition) == wanted


@pytest.mark.parametrize(("count", "partition"), [(5, Partition(0)), (3, HEADS)])
def test_what_does_not_divide_is_refused_with_its_numbers(count, partition):
    with pytest.raises(Unsupported, match=rf"{count} chips; choose another --tensor-parallel"):
        FakeRanks(count).cut((16, 12), partition)


def test_repeated_heads_are_read_from_where_they_are():
    cut = Cut(axis=0, unit=8, repeat=2)
    assert cut.global_shape((16, 3)) == (32, 3)
    parts = [cut.source_index((slice(8 * r, 8 * r + 8), slice(0, 3)))[0] for r in range(4)]
    assert parts == [slice(0, 8), slice(0, 8), slice(8, 16), slice(8, 16)]


@pytest.mark.parametrize(("dim", "wanted"), [(64, 128), (128, 256), (80, 256), (96, 256), (8, 128)])
def test_lane_width(dim, wanted):
    assert lane_width(dim) == wanted


def test_kv_heads_that_do_not_divide_are_refused():
    assert FakeRanks(4).kv_heads(8) == 8
    assert FakeRanks(4).kv_heads(2) == 4
    with pytest.raises(Unsupported, match="3 KV heads do not divide among 4 chips"):
        FakeRanks(4).kv_heads(3)


def test_more_ranks_than_devices_are_refused():
    make()  # JAX has started: it splits the host no more
    limits = Limits(tensor_parallel_size=64)
    with pytest.raises(DeviceNotFound, match="--tensor-parallel-size is 64"):
        create_backend(INTERPRETED, {}, limits)


# --- types and shapes ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "int64", "float8_e4m3fn"])
def test_types_that_jax_would_change_silently_are_refused(dtype):
    with pytest.raises(Unsupported, match="this backend holds"):
        make().upload(np.zeros(2, np.float32), dtype)


def test_kv_write_checks_the_shape():
    backend = make()
    kv = backend.kv_alloc(KVSpec((KVLayerSpec(2, 16),), 8, "float32"), 3)
    with pytest.raises(ContractViolation, match="it must be"):
        backend.kv_write(kv[0], [1], np.zeros((1, 2, 8, 1, 16), np.float32))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (OpSpec("attention", features=frozenset({"sinks"})), "'sinks' is not known"),
        (OpSpec("attention", dtype="float16"), "dtype float16"),
        (OpSpec("attention", kv_dtype="int8"), "dtype int8"),
        (OpSpec("attention", head_dim=100), "head dim 100 is not proved"),
        (OpSpec("attention", block_size=4), "block size 4"),
        (OpSpec("teleport"), "no op 'teleport'"),
    ],
)
def test_why_not(spec, reason):
    assert reason in (why_not(spec) or "")


def test_there_is_no_objection_to_what_is_claimed():
    spec = OpSpec("attention", "bfloat16", "bfloat16", 64, 9, 3, 32, frozenset({"window"}))
    assert why_not(spec) is None


# --- memory -------------------------------------------------------------------------------


def test_pretended_memory_is_counted_and_enforced():
    backend = make(memory_bytes=1 << 20)
    assert backend.memory().total == 1 << 20
    kept = backend.upload(np.zeros(1 << 17, np.float32))
    assert backend.memory().used == 1 << 19
    with pytest.raises(DeviceOOM, match="during load"):
        backend.upload(np.zeros((1 << 17) + 1, np.float32))
    with pytest.raises(DeviceOOM, match="during kv"):
        backend.kv_alloc(KVSpec((KVLayerSpec(1, 64),), 8, "float32"), 200)
    del kept
    assert backend.memory().used == 0
    assert backend.memory().peak == 1 << 19


def test_close_deletes_what_was_uploaded():
    backend = make()
    array = backend.upload(np.zeros(4, np.float32))
    backend.close()
    assert array.is_deleted()
    assert backend.memory().used == 0
    backend.close()


class FakeChip:
    def __init__(self, in_use, peak=0, **reserved):
        self.stats = {"bytes_limit": 100, "bytes_in_use": in_use, "peak_bytes_in_use": peak}
        self.stats |= reserved

    def memory_stats(self):
        return self.stats


def test_the_fullest_chip_decides_what_is_free():
    info = ChipMemory([FakeChip(30, 90), FakeChip(60, 90)]).read(Ledger())
    assert (info.total, info.free, info.used, info.peak) == (200, 80, 90, 180)


def test_what_is_reserved_for_programs_is_used_and_part_of_the_peak():
    chips = [FakeChip(30, 31, bytes_reserved=10, peak_bytes_reserved=25), FakeChip(30, 31)]
    info = ChipMemory(chips).read(Ledger())
    assert (info.free, info.used, info.peak) == (120, 70, 85)


def test_scratch_that_the_compiler_knows_of_is_part_of_the_peak():
    ledger = Ledger()
    assert [ledger.share_scratch(size) for size in (20, 8, 21)] == [20, 0, 1]
    assert ChipMemory([FakeChip(30, 31)]).read(ledger).peak == 51


def test_a_weight_that_cannot_fit_is_refused_before_it_is_read(monkeypatch):
    backend = make()
    monkeypatch.setattr(backend, "_target", replace(backend._target, interpret=False))
    monkeypatch.setattr(backend, "_memory", ChipMemory([FakeChip(30)]))

    class Unread:
        shape, dtype = (20,), "float32"

        def read(self, index=None):
            raise AssertionError("it was read")

    with pytest.raises(DeviceOOM, match="during load"):
        backend.upload(Unread())


def test_scratch_of_steps_is_counted_once():
    backend = make()
    weights = {"x": backend.upload(np.zeros(1 << 16, np.float32))}

    def step(weights, kv_d, arrays):
        return {"smallest": jnp.sort(weights["x"])[:4]}, kv_d

    first = backend.compile(step, BUCKET, weights, [])
    second = backend.compile(step, BUCKET, weights, [])
    assert first.bytes >= 4 << 16
    assert second.bytes < 4 << 16


# --- the namespace ------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 256, 257, 600])
def test_top_k_on_both_sides_of_what_xla_selects(k):
    x = np.random.default_rng(0).standard_normal((3, 600)).astype(np.float32)
    x[0, :5], x[1, 7] = 9.0, -np.inf
    values, indices = (np.asarray(array) for array in jax_namespace().top_k(x, k))
    np.testing.assert_array_equal(values, -np.sort(-x, axis=1)[:, :k])
    np.testing.assert_array_equal(np.take_along_axis(x, indices, axis=1), values)
    assert indices.dtype == np.int32


# --- a step -------------------------------------------------------------------------------


def test_outputs_are_on_their_way_before_one_is_asked_for(monkeypatch):
    sent = []
    step = make().compile(lambda w, kv, a: ({"x": a.token_ids, "y": a.slots}, kv), BUCKET, {}, [])
    array_type = type(jnp.zeros(1))
    monkeypatch.setattr(array_type, "copy_to_host_async", lambda array: sent.append(array))
    ints, floats = (np.zeros(n, t) for n, t in zip(packed_sizes(BUCKET), "if", strict=True))
    outputs, _ = step.run(StepBatch(BUCKET, ints, floats, 1, 1, 1), [])
    assert [id(array) for array in sent] == [id(array) for array in outputs.values()]


# --- errors -------------------------------------------------------------------------------

OOM = "RESOURCE_EXHAUSTED: Attempting to allocate 1.50G. That was not possible."
HBM = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.00G of 15.75G hbm."
VMEM = "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem."
LOADING = (
    "RESOURCE_EXHAUSTED: Error loading program 'jit_run': Attempting to reserve 6.48G at the "
    "bottom of memory. That was not possible. There are 6.78G free, 0B reserved."
)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (OOM, DeviceOOM),
        ("UNAVAILABLE: socket closed", DeviceLost),
        ("INTERNAL: Core halted unexpectedly", DeviceLost),
        ("INVALID_ARGUMENT: a shape", jax.errors.JaxRuntimeError),
    ],
)
def test_device_errors(text, wanted):
    with pytest.raises(wanted), device_errors("step", 0, lambda: 7):
        raise jax.errors.JaxRuntimeError(text)


def test_oom_carries_the_figures():
    with pytest.raises(DeviceOOM) as caught, device_errors("load", 0, lambda: 7):
        raise jax.errors.JaxRuntimeError(OOM)
    assert (caught.value.requested, caught.value.free) == (3 << 29, 7)
    assert asked_bytes(HBM) == 20 << 30
    assert asked_bytes(LOADING) == int(6.48 * 2**30)
    assert asked_bytes("no figure") == 0


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (jax.errors.JaxRuntimeError(HBM), DeviceOOM),
        (jax.errors.JaxRuntimeError(LOADING), DeviceOOM),
        (jax.errors.JaxRuntimeError(VMEM), CompileError),
        (NotImplementedError("sort"), CompileError),
        (Unsupported("linear", None, "why"), Unsupported),
    ],
)
def test_compile_errors(error, wanted):
    with pytest.raises(wanted), compile_errors(BUCKET, lambda: 7):
        raise error


def test_a_step_that_cannot_be_traced_names_its_bucket():
    def step(weights, kv_d, arrays):
        return {"x": int(arrays.token_ids[0])}, kv_d

    with pytest.raises(CompileError, match=r"num_tokens=1.*ConcretizationTypeError"):
        make().compile(step, BUCKET, {}, [])


# --- compiling behind the call ------------------------------------------------------------


def double(weights, kv_d, arrays):
    return {"x": arrays.token_ids * 2}, kv_d


def test_steps_are_compiled_side_by_side(monkeypatch):
    both = threading.Barrier(2, timeout=60)

    def compile_together(*args):
        both.wait()
        return compile_lowered(*args)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("leadframe_tpu.steps.compile_lowered", compile_together)
    backend = make()
    steps = [backend.compile(double, BUCKET, {}, []) for _ in range(2)]
    assert all(step.compile_seconds > 0 and step.bytes >= 0 for step in steps)


def test_what_the_compiler_finds_is_told_to_who_asks_the_step(monkeypatch):
    def fail(*args):
        raise jax.errors.JaxRuntimeError(LOADING)

    monkeypatch.setattr("leadframe_tpu.steps.compile_lowered", fail)
    step = make().compile(double, BUCKET, {}, [])
    for ask in (lambda: step.bytes, lambda: step.run(None, [])):
        with pytest.raises(DeviceOOM, match="during compile"):
            ask()


def test_a_closed_backend_compiles_no_more(monkeypatch):
    begun, may_end = [], threading.Event()

    def wait(*args):
        begun.append(args)
        may_end.wait(60)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr("leadframe_tpu.steps.compile_lowered", wait)
    backend = make()
    steps = [backend.compile(double, BUCKET, {}, []) for _ in range(3)]
    pending = [step._held[0]._pending for step in steps]
    steps[1].close()
    backend.close()
    may_end.set()
    pending[0].result(60)
    assert len(begun) == 1
    assert pending[1].cancelled()
    assert pending[2].cancelled()


# --- the cache ----------------------------------------------------------------------------

CACHE = """
import json, os, stat, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import numpy as np
from leadframe.platform import Bucket, Limits
from leadframe_tpu.create import create_backend
from leadframe_tpu.detect import INTERPRETED
backend = create_backend(INTERPRETED, {"compile_cache": sys.argv[1]}, Limits())
x = backend.upload(np.ones((4, 4), np.float32))
step = lambda weights, kv_d, arrays: ({"y": weights["x"] @ weights["x"] + 1}, kv_d)
compiled = backend.compile(step, Bucket(1, 1, 1, 1, 1), {"x": x}, [])
mode = oct(stat.S_IMODE(os.stat(sys.argv[1]).st_mode)) if sys.argv[1] != "off" else ""
print(json.dumps([compiled.cache_hit, mode]))
"""


def compile_in_a_process(folder):
    done = subprocess.run(
        [sys.executable, "-c", CACHE, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_a_second_process_finds_the_step_in_the_cache(tmp_path):
    folder = tmp_path / "steps"
    assert compile_in_a_process(folder) == [False, "0o700"]
    assert compile_in_a_process(folder) == [True, "0o700"]


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        ({"LEADFRAME_CACHE_DIR": "/mine", "XDG_CACHE_HOME": "/xdg"}, "/mine/tpu"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/leadframe/tpu"),
        ({"LEADFRAME_CACHE_DIR": "", "XDG_CACHE_HOME": ""}, "~/.cache/leadframe/tpu"),
    ],
)
def test_steps_are_kept_beside_what_other_backends_keep(env, wanted):
    assert default_folder(env) == Path(wanted).expanduser()


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch, caplog):
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(ConfigError, match=r"compile_cache=.*/file/x cannot be used"):
        make(compile_cache=str(blocked / "x"))
    monkeypatch.setenv("LEADFRAME_CACHE_DIR", str(blocked))
    _set_cache("auto", is_interpreted=False)  # as on a chip: it serves all the same
    assert "every start compiles every step" in caplog.text


def test_without_a_cache_nothing_is_said_about_hits():
    assert compile_in_a_process("off") == [None, ""]
