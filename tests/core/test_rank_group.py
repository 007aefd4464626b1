"""The processes of a group, as rank 0 sees them: started, asked, failing, gone, hung."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from leadframe.engine.ranks import group as module
from leadframe.engine.ranks.group import RankGroup
from leadframe.engine.ranks.wire import config_fields
from leadframe.errors import DeviceLost, DeviceOOM, InternalError, Unsupported
from leadframe.llm import engine_config
from leadframe.platform import Limits


@pytest.fixture
def make_group(tmp_path, monkeypatch):
    """Makes groups, of real workers or of processes that only hold their end of the socket."""
    made = []

    def make(count=2, *, is_real=True):
        if not is_real:
            monkeypatch.setattr(module, "start_process", start_sleeper)
        folder = tmp_path / "ranks"
        folder.mkdir()
        made.append(RankGroup(count, str(folder)))
        return made[-1]

    yield make
    for group in made:
        group.close()


def start_sleeper(name, rendezvous):
    code = "import sys; sys.stdin.read()"
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=theirs.fileno(), stdout=subprocess.DEVNULL
        )
    return process, ours


def kill(group, rank=1):
    os.kill(group._peers[rank - 1].process.pid, signal.SIGKILL)


def create(group, tiny_model):
    """Gives every worker a reference backend."""
    config = engine_config(str(tiny_model), device="reference", block_size=4)
    fields = {"config": config_fields(config), "device": "reference", "log_level": 50}
    group.send("create", fields | {"limits": dataclasses.asdict(Limits())})
    return group.collect()


def test_workers_answer_and_leave_when_told(make_group, tiny_model, tmp_path):
    group = make_group()
    assert [reply.op for reply in create(group, tiny_model)] == ["done"]
    group.send("memory")
    assert len(group.collect()) == 1
    (peer,) = group._peers
    left = []
    group.close(leave=lambda: left.append(True))
    group.close()
    assert left == [True]
    assert peer.process.returncode == 0
    assert not (tmp_path / "ranks").exists()


def test_a_failure_has_its_type_and_its_rank_and_ends_the_rank(make_group, tiny_model):
    """Also one that nobody waits for an answer to: it is told at the next call."""
    group = make_group(3)
    create(group, tiny_model)
    group._peers[0].channel.send("kv_read", {"layer": 7, "blocks": [1]})
    group._peers[1].channel.send("memory")
    with pytest.raises(InternalError, match=r"rank 1 \(process \d+\): IndexError"):
        group.collect()
    assert group._is_lost.wait(20)
    with pytest.raises(DeviceLost, match=r"one of 3 ranks is lost: rank 1 .*IndexError"):
        group.send("memory")
    group.tell("kv_free")  # nothing to free any more


def test_a_dead_worker_is_behind_whatever_rank_0_meets(make_group):
    group = make_group(is_real=False)

    def step():
        with group.together():
            kill(group)
            raise Unsupported("run", "batch", "connection closed by peer")

    with pytest.raises(DeviceLost, match=r"rank 1 .* was ended by signal 9"):
        step()


def test_an_error_of_rank_0_alone_stays_what_it_is(make_group, monkeypatch):
    monkeypatch.setattr(module, "_TELL_SECONDS", 0.1)
    group = make_group(is_real=False)
    with pytest.raises(Unsupported), group.together():
        raise Unsupported("run", "batch", "no")
    alone = "rank 0 failed where 2 ranks go together"
    with pytest.raises(DeviceLost, match=alone), group.together():
        raise DeviceOOM(2, 1, "step")


def test_a_loss_is_told_once_while_nothing_runs(make_group):
    group, told = make_group(3, is_real=False), []
    is_told = threading.Event()
    group.on_lost = lambda loss: (told.append(str(loss)), is_told.set())
    kill(group, 2)
    assert is_told.wait(20)
    kill(group, 1)
    group._peers[0]._thread.join(20)
    (text,) = told
    assert "rank 2" in text


def test_a_device_that_waits_for_ever_ends_the_process(make_group, monkeypatch):
    monkeypatch.setattr(module, "_HUNG_SECONDS", 0.2)
    statuses, ended = [], threading.Event()
    monkeypatch.setattr(module.os, "_exit", lambda code: (statuses.append(code), ended.set()))
    group = make_group(is_real=False)
    with group.together():
        kill(group)
        assert ended.wait(20)
    assert statuses == [DeviceLost.exit_code]


def test_an_idle_process_is_left_alone(make_group, monkeypatch):
    monkeypatch.setattr(module, "_HUNG_SECONDS", 0.1)
    statuses = []
    monkeypatch.setattr(module.os, "_exit", statuses.append)
    group = make_group(is_real=False)
    kill(group)
    group._peers[0]._thread.join(20)
    assert statuses == []
