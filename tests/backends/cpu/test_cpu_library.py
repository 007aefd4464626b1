"""Building, caching and losing the native library, and its threads."""

import shutil
import subprocess
import sys
import tempfile
import threading

import numpy as np
import pytest
import torch

from leadframe.errors import ConfigError
from leadframe_cpu import library
from leadframe_cpu.backend import CpuBackend


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has loaded nothing and has an empty cache."""
    library.load_library.cache_clear()
    monkeypatch.delenv("LEADFRAME_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path
    library.load_library.cache_clear()


def test_without_a_compiler_torch_serves_and_says_why(fresh, monkeypatch, caplog):
    monkeypatch.setattr(library, "COMPILERS", ("no-such-compiler",))
    backend = CpuBackend(threads=torch.get_num_threads())
    assert "no-such-compiler" in backend.native_reason
    assert "without native kernels" in caplog.text
    assert not backend.caps.batch_invariant
    x = torch.randn(2, 8)
    weight = backend.upload(np.ones((3, 8), np.float32), role="linear")
    torch.testing.assert_close(
        backend.ops["linear"](x, weight), x.sum(1, keepdim=True).expand(2, 3)
    )


def test_required_and_absent_is_an_error(fresh, monkeypatch):
    monkeypatch.setattr(library, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(ConfigError, match=r"native=on.*apt-get install"):
        CpuBackend(threads=1, native="on")
    with pytest.raises(ConfigError, match="traces torch's own ops"):
        CpuBackend(threads=1, native="on", compile_mode="step")


def test_a_compiler_that_fails_is_quoted(fresh, monkeypatch):
    monkeypatch.setattr(library, "FLAGS", ("-no-such-flag",))
    with pytest.raises(library.NativeUnavailable, match="no-such-flag"):
        library.load_library()
    assert not list(fresh.rglob("*.so"))


def test_compiling_is_announced_where_nobody_set_up_logging(tmp_path):
    """The start would seem to hang; the compiler is replaced by one that is fast."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from leadframe_cpu import library\n"
        "library._run_all = lambda commands: Path(commands[-1][-1]).touch()\n"
        "library._build('g++', [Path('a.cpp')], Path(sys.argv[1]))\n"
    )
    target = tmp_path / "folder" / "kernels.so"
    argv = [sys.executable, "-c", code, str(target)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert "compiling the CPU kernels for" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert target.exists()


def test_a_damaged_cache_is_reported_and_removed(fresh, monkeypatch):
    def damaged(compiler, sources, target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"not a library")

    monkeypatch.setattr(library, "_build", damaged)
    with pytest.raises(library.NativeUnavailable, match="could not be loaded"):
        library.load_library()
    assert not list(fresh.rglob("*.so"))


def test_the_cache_is_used_and_changes_with_what_it_depends_on(fresh, monkeypatch):
    sources = library._sources()
    assert {path.name for path in sources} >= {"linear.cpp", "attention.cpp", "simd.h"}
    key = library._key("g++", sources)
    assert key == library._key("g++", sources)
    assert key != library._key("g++", sources[1:])
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-O1"))
    assert key != library._key("g++", sources)


def test_the_cache_folder_can_be_chosen(fresh, monkeypatch, tmp_path):
    assert library.cache_folder() == tmp_path / "leadframe" / "cpu"
    monkeypatch.setenv("LEADFRAME_CACHE_DIR", str(tmp_path / "mine"))
    assert library.cache_folder() == tmp_path / "mine" / "cpu"
    assert library.cache_folder().stat().st_mode & 0o777 == 0o700


def test_without_a_writable_cache_the_kernels_leave_no_file(native, fresh, monkeypatch, tmp_path):
    built, blocked, temporary = [], tmp_path / "file", tmp_path / "temporary"
    blocked.write_text("")
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def copy(compiler, sources, target):
        target.parent.mkdir(parents=True)
        shutil.copy(native._packer._library.path, target)
        built.append(target)

    monkeypatch.setattr(library, "_build", copy)
    assert library.cache_folder() is None
    loaded = library.load_library()
    assert built[0].is_relative_to(temporary)
    assert not list(temporary.iterdir())
    assert loaded.packed_bytes(0, 16, 16) > 0, "what is loaded works on"


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same_bits(native, rng, threads):
    weight = native.upload(rng.standard_normal((200, 64)).astype(np.float32), role="linear")
    x = torch.from_numpy(rng.standard_normal((50, 64)).astype(np.float32))
    want = native.ops["linear"](x, weight)
    try:
        native._packer._library.set_threads(threads, 50)
        for _ in range(200):
            assert torch.equal(native.ops["linear"](x, weight), want)
    finally:
        native._packer._library.set_threads(3, 50)


def test_two_threads_may_use_two_backends_at_once(native, rng):
    other = CpuBackend(threads=3, native="on")
    weight = rng.standard_normal((300, 64)).astype(np.float32)
    x = torch.from_numpy(rng.standard_normal((40, 64)).astype(np.float32))
    want = x @ torch.from_numpy(weight).T
    problems = []

    def work(backend):
        packed = backend.upload(weight, role="linear")
        for _ in range(200):
            out = backend.ops["linear"](x, packed)
            if not torch.allclose(out, want, atol=1e-4):
                problems.append(out)

    workers = [threading.Thread(target=work, args=(b,)) for b in (native, other)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not problems


_EXIT = """
import numpy as np, torch
from leadframe_cpu.backend import CpuBackend
backend = CpuBackend(threads=4, native="on")
weight = backend.upload(np.ones((256, 64), np.float32), role="linear")
print(int(backend.ops["linear"](torch.ones(40, 64), weight).sum()))
"""


def test_the_process_ends_with_idle_threads():
    done = subprocess.run(
        [sys.executable, "-c", _EXIT], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == str(256 * 40 * 64)
