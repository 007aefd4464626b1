"""The ranks of a tensor-parallel group without a second process: messages, a worker, divisions."""

import dataclasses
import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from leadframe import errors
from leadframe.config import EngineConfig
from leadframe.engine.ranks import worker as worker_module
from leadframe.engine.ranks.backend import RankedBackend
from leadframe.engine.ranks.group import head_parts
from leadframe.engine.ranks.wire import (
    Channel,
    config_fields,
    error_fields,
    read_config,
    read_error,
)
from leadframe.engine.ranks.worker import Inbox, serve
from leadframe.llm import engine_config
from leadframe.models import check_ranks, open_checkpoint
from leadframe.models.info import GenerationDefaults
from leadframe.models.model import DecoderModel
from leadframe.models.spec import DecoderSpec, LayerSpec, RopeSpec
from leadframe.platform import AttnParams, KVLayerSpec, KVSpec, Limits, MemoryInfo
from leadframe.platform.batch import StepBatch
from leadframe.platform.reference.backend import ReferenceBackend

SPEC = KVSpec((KVLayerSpec(2, 8),) * 2, 4)


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield [Channel(end) for end in ends]
    for end in ends:
        end.close()


def test_a_message_arrives_as_it_was_sent(pair):
    ours, theirs = pair
    arrays = [np.arange(6, dtype=np.int32), np.zeros((0,), np.float32), np.ones((2, 3, 1))]
    threading.Thread(target=ours.send, args=("run", {"live": [1, None, "é"]}, arrays)).start()
    message = theirs.receive()
    assert (message.op, message.fields) == ("run", {"live": [1, None, "é"]})
    for sent, got in zip(arrays, message.arrays, strict=True):
        assert got.dtype == sent.dtype
        np.testing.assert_array_equal(got, sent)
    assert message.arrays[0].flags.writeable, "torch warns of arrays that are not"


def test_an_end_that_is_gone_is_the_end(pair):
    ours, theirs = pair
    ours.end()
    assert theirs.receive() is None
    theirs.close()
    with pytest.raises(OSError, match="Broken pipe"):
        ours.send("memory")


def test_all_of_a_batch_travels():
    """`RankedStep.run` sends these; whatever else a batch has would not reach the other ranks."""
    names = [field.name for field in dataclasses.fields(StepBatch)]
    assert names == ["bucket", "ints", "floats", "live_tokens", "live_seqs", "max_seq_len"]


def test_settings_travel():
    config = engine_config(
        "model", op_order={"attention": ("a", "b")}, options={"k": "v"}, block_size=8, seed=3
    )
    fields = config_fields(config)
    assert read_config(fields) == config
    assert read_config(config_fields(EngineConfig())) == EngineConfig()


@pytest.mark.parametrize(
    "error",
    [
        errors.DeviceOOM(5, 3, "kv"),
        errors.Unsupported("upload", KVLayerSpec(1, 2), "no"),
        errors.ContractViolation("x", ["a", "b"]),
        errors.ModelNotFound("no such model"),
        errors.CompileError("bucket", "why"),
        errors.BackendBug("run", ValueError("x")),
    ],
)
def test_an_error_keeps_its_type_and_its_text(error):
    again = read_error(error_fields(error), "rank 3")
    assert type(again) is type(error)
    assert str(again) == f"rank 3: {error}"
    if isinstance(error, errors.DeviceOOM):
        assert (again.requested, again.free, again.phase) == (5, 3, "kv")


def test_any_other_exception_is_a_bug_of_ours():
    again = read_error(error_fields(KeyError("x")), "rank 1")
    assert type(again) is errors.InternalError
    assert "KeyError: 'x'" in str(again)
    unknown = read_error({"type": "os", "text": "t", "attributes": {}}, "rank 1")
    assert type(unknown) is errors.InternalError


def test_heads_are_cut_or_repeated():
    assert head_parts(4, 2) == [slice(0, 2), slice(2, 4)]
    assert head_parts(2, 4) == [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]
    assert head_parts(3, 1) == [slice(0, 3)]


# --- a worker -------------------------------------------------------------------------------


@pytest.fixture
def rendezvous(tmp_path):
    return tmp_path / "ranks"


@pytest.fixture
def worker(pair, tiny_model, rendezvous):
    """Talks to a worker in a thread."""
    ours, theirs = pair
    status = []
    thread = threading.Thread(target=lambda: status.append(serve(theirs, str(rendezvous))))
    thread.start()

    def ask(op, fields=None, arrays=(), *, replies=True):
        ours.send(op, fields, arrays)
        return ours.receive() if replies else None

    config = engine_config(str(tiny_model), device="reference", block_size=4)
    rendezvous.mkdir()
    limits = dataclasses.asdict(Limits(rendezvous=str(rendezvous)))
    created = {"config": config_fields(config), "device": "reference", "limits": limits}
    ask.create = lambda **changes: ask("create", {**created, "log_level": 30, **changes})
    ask.status = lambda: (thread.join(30), status[0])[-1]
    ask.end = ours.end
    yield ask
    ours.end()
    thread.join(30)


def test_a_worker_does_what_it_is_told(worker, rendezvous):
    assert worker.create().op == "done"
    assert worker("load").op == "done"
    spec = dataclasses.asdict(SPEC)
    assert worker("kv_alloc", {"spec": spec, "blocks": 5}).op == "done"
    data = np.random.default_rng(0).standard_normal((2, 2, 4, 2, 8)).astype(np.float32)
    worker("kv_write", {"layer": 1, "blocks": [3, 1]}, [data], replies=False)
    reply = worker("kv_read", {"layer": 1, "blocks": [3, 1]})
    np.testing.assert_array_equal(reply.arrays[0], data)
    assert MemoryInfo(**worker("memory").fields).used > 0
    worker("kv_free", replies=False)
    worker("leave", replies=False)
    assert worker.status() == 0
    assert rendezvous.exists(), "it is rank 0's"


def test_a_worker_clears_up_after_a_rank_0_that_is_gone(worker, rendezvous):
    worker.create()
    worker.end()
    assert worker.status() == 1
    assert not rendezvous.exists()


def test_a_worker_clears_up_after_a_rank_0_that_never_said_anything(worker, rendezvous):
    worker.end()
    assert worker.status() == 1
    assert not rendezvous.exists()


def test_a_worker_inside_a_long_call_clears_up_too_and_ends(pair, rendezvous, monkeypatch):
    ours, theirs = pair
    found, left = [], threading.Event()
    monkeypatch.setattr(worker_module, "_LEAVE_SECONDS", 0.05)
    monkeypatch.setattr(
        worker_module.os,
        "_exit",
        lambda status: (found.append((status, rendezvous.exists())), left.set()),
    )
    rendezvous.mkdir()
    Inbox(theirs, str(rendezvous))  # nobody takes a message out of it
    ours.send("create", {})
    ours.end()
    assert left.wait(20)
    assert found == [(1, False)]


def test_a_cache_that_does_not_fit_is_said_and_survived(worker):
    worker.create()
    spec = dataclasses.asdict(SPEC)
    reply = worker("kv_alloc", {"spec": spec, "blocks": 2**40})
    assert (reply.op, reply.fields["type"]) == ("error", "DeviceOOM")
    assert worker("kv_alloc", {"spec": spec, "blocks": 5}).op == "done"


def test_any_other_failure_is_said_and_ends_the_worker(worker):
    worker.create()
    reply = worker("kv_read", {"layer": 7, "blocks": [1]})
    assert (reply.op, reply.fields["type"]) == ("error", "InternalError")
    assert worker.status() == 1


def test_a_worker_that_cannot_start_says_why(worker):
    reply = worker.create(device="abacus")
    assert (reply.op, reply.fields["type"]) == ("error", "PlatformNotInstalled")
    assert worker.status() == 1


# --- rank 0 ---------------------------------------------------------------------------------


class OtherRanks:
    """Stands in for a group whose other ranks answer as they were told to."""

    def __init__(self, count, **replies):
        self.count, self.replies, self.sent = count, replies, []

    def send(self, op, fields=None, arrays=()):
        self.sent.append(op)

    tell = send

    def collect(self):
        made = self.replies[self.sent[-1]]
        if isinstance(made, Exception):
            raise made
        return [SimpleNamespace(fields=one, arrays=()) for one in made]


def test_memory_is_that_of_the_rank_with_the_least_room():
    own = ReferenceBackend()
    own.memory = lambda: MemoryInfo(total=100, free=60, used=10, peak=12)
    others = [{"total": 90, "free": 70, "used": 5, "peak": 50}]
    both = RankedBackend(own, OtherRanks(2, memory=others))
    assert both.memory() == MemoryInfo(total=180, free=120, used=20, peak=100)
    assert both.kv_block_bytes(SPEC) == 2 * own.kv_block_bytes(SPEC)


def test_a_cache_is_allocated_on_every_rank_or_on_none():
    own = ReferenceBackend()
    before = own.memory().used
    group = OtherRanks(2, kv_alloc=errors.DeviceOOM(100, 40, "kv"))
    with pytest.raises(errors.DeviceOOM) as failure:
        RankedBackend(own, group).kv_alloc(SPEC, 8)
    assert (failure.value.requested, failure.value.free) == (200, 80), "sizes are sums"
    assert own.memory().used == before
    assert group.sent == ["kv_alloc", "kv_free"]


# --- models that do not divide --------------------------------------------------------------


def model(**changes):
    spec = {
        "architecture": "tiny",
        "vocab_size": 48,
        "hidden_size": 72,
        "intermediate_size": 96,
        "num_heads": 12,
        "num_kv_heads": 4,
        "head_dim": 8,
        "layers": (LayerSpec(AttnParams.of(0.3)),),
        "ropes": (RopeSpec((1.0,) * 4),),
        "max_position_embeddings": 64,
        "norm_eps": 1e-5,
    }
    return DecoderModel(DecoderSpec(**(spec | changes)), GenerationDefaults())


@pytest.mark.parametrize(
    ("changes", "ranks", "problem"),
    [
        ({}, 5, r"embed_tokens.weight has 48 rows"),
        ({}, 3, r"k_proj.weight has 4 heads.*by: 1, 2, 4, 12$"),
        ({}, 24, r"q_proj.weight has 12 heads"),
        ({"num_heads": 9, "num_kv_heads": 3}, 2, r"has 9 heads.*by: 1, 3$"),
        ({"intermediate_size": 100}, 12, r"gate_proj.weight has 100 rows"),
        ({"num_heads": 2, "num_kv_heads": 2}, 4, r"q_proj.weight has 2 heads"),
        ({"num_heads": 2, "num_kv_heads": 1}, 4, r"o_proj.weight has 2 heads|q_proj.* has 2 heads"),
    ],
)
def test_a_model_that_does_not_divide_is_refused_with_its_numbers(changes, ranks, problem):
    with pytest.raises(errors.ConfigError, match=rf"--tensor-parallel-size is {ranks}.*{problem}"):
        check_ranks(model(**changes), ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4, 12])
def test_a_model_that_divides_is_taken(ranks):
    check_ranks(model(), ranks)


def test_the_default_model_divides_by_three():
    default = open_checkpoint(None).model
    check_ranks(default, 3)
    with pytest.raises(errors.ConfigError, match=r"by: 1, 3$"):
        check_ranks(default, 2)
