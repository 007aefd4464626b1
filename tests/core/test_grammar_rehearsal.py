"""Grammars that end the process that compiles them, or keep it for ever, and what is left after."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from leadframe.errors import EngineDead, InternalError, RequestError
from leadframe.grammar import GrammarCompiler, compiler, lark, rehearsal
from leadframe.grammar.rehearsal import Rehearsal
from leadframe.grammar.vocabulary import TokenTable, read_tokens
from leadframe.structured_outputs import StructuredOutputs

SCHEMA = {"type": "integer", "minimum": -1e19, "maximum": -1e19}
DEADLY = 'start: %json {"type":"integer","minimum":-1e19,"maximum":-1e19}\n'
ENDLESS = "start: A\nA: /(x{97})*y/ & /(x{101})*y/ & /(x{103})*y/ & /(x{107})*y/\n"
GOOD = 'start: "a"\n'


class Bytes:
    vocab_size = 257

    def token_bytes(self, token_id):
        return bytes([token_id]) if token_id < 256 else b""

    def is_special(self, token_id):
        return token_id == 256


def table():
    return read_tokens(Bytes(), 257, {256})


@pytest.fixture
def made():
    """Makes rehearsals that are closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(seconds=20.0):
            one = Rehearsal(table, seconds)
            stack.callback(one.close)
            return one

        yield make


def pid_of(one):
    return one._worker.process.pid if one._worker is not None else None


def is_there(pid):
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def eventually(check, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not check() and time.monotonic() < deadline:
        time.sleep(0.02)
    return check()


def test_it_starts_with_the_first_grammar_and_stays(made) -> None:
    one = made()
    assert pid_of(one) is None
    assert one.problem(GOOD) is None
    first = pid_of(one)
    assert one.problem('start: "b"') is None
    assert "unknown name" in one.problem("start: nothing")
    assert pid_of(one) == first
    one.close()
    assert not is_there(first)


def test_what_ends_the_process_is_refused_for_good(made, caplog) -> None:
    one = made()
    assert one.problem(GOOD) is None
    first = pid_of(one)
    assert "more memory or recursion" in one.problem(DEADLY)
    assert "a grammar was refused" in caplog.text
    assert not is_there(first)
    assert "more memory or recursion" in one.problem(DEADLY)
    assert pid_of(one) is None, "it is known: no further process had to die"
    assert one.problem(GOOD) is None


def test_what_takes_for_ever_is_ended(made) -> None:
    one = made(seconds=0.5)
    assert one.problem(GOOD) is None
    first, started = pid_of(one), time.monotonic()
    assert "not compiled in 0.5 s" in one.problem(ENDLESS)
    assert time.monotonic() - started < 10
    assert not is_there(first)
    assert one.problem(GOOD) is None


def test_what_works_for_seconds_is_ended_by_the_kernel(made) -> None:
    """Long before its time is up: others wait for the process."""
    one = made(seconds=60)
    assert re.search(r"not compiled in \d\.\d s", one.problem(ENDLESS))
    assert one.problem(GOOD) is None


def test_the_process_is_limited_and_out_of_reach_of_the_terminal(made) -> None:
    one = made()
    one.problem(GOOD)
    limits = Path(f"/proc/{pid_of(one)}/limits").read_text().splitlines()
    size = next(line.split()[3] for line in limits if line.startswith("Max address space"))
    core = next(line.split()[4:6] for line in limits if line.startswith("Max core file size"))
    assert int(size) < 4 << 30
    assert core == ["0", "0"]
    assert os.getsid(pid_of(one)) == pid_of(one)
    os.kill(pid_of(one), signal.SIGINT)
    assert one.problem('start: "b"') is None


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [("_MAX_CPU_SECONDS", -1, "s to compile"), ("_MAX_KEPT_BYTES", -(1 << 40), "MiB when")],
)
def test_what_costs_too_much_is_not_compiled_twice(made, monkeypatch, limit, value, words) -> None:
    monkeypatch.setattr(rehearsal, limit, value)
    one = made()
    assert words in one.problem(GOOD)
    one.close()
    assert words in one.problem(GOOD), "remembered"


def test_what_is_remembered_of_refusals_is_bounded(made, monkeypatch) -> None:
    monkeypatch.setattr(rehearsal, "_MAX_CPU_SECONDS", -1)
    monkeypatch.setattr(rehearsal, "_MAX_REFUSED", 2)
    one = made()
    for text in "abc":
        one.problem(f'start: "{text}"')
    assert len(one._refused) == 2
    one.problem("start: nothing")
    assert len(one._refused) == 2, "what fails at once is cheap to try again"


def test_a_process_that_was_ended_from_outside_is_replaced(made) -> None:
    one = made()
    one.problem(GOOD)
    first = pid_of(one)
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: one._worker.process.poll() is not None)
    assert one.problem('start: "b"') is None
    assert pid_of(one) != first


def test_a_process_that_has_grown_is_replaced(made, monkeypatch) -> None:
    one = made()
    one.problem(GOOD)
    first = pid_of(one)
    usual = one._worker.ask

    def ask(op, fields, seconds):
        reply = usual(op, fields, seconds)
        reply.fields["is_worn"] = True
        return reply

    monkeypatch.setattr(one._worker, "ask", ask)
    assert one.problem('start: "b"') is None
    assert not is_there(first)


def test_a_process_that_cannot_start_says_so(made, monkeypatch) -> None:
    monkeypatch.setattr(rehearsal, "_WORKER", "leadframe.no_such_module")
    with pytest.raises(InternalError, match="did not start: status"):
        made().problem(GOOD)


def test_closing_does_not_wait_for_what_is_compiled(made) -> None:
    one, raised = made(seconds=60), []

    def work():
        try:
            one.problem(ENDLESS)
        except EngineDead as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert eventually(lambda: pid_of(one) is not None)
    pid, started = pid_of(one), time.monotonic()
    one.close()
    thread.join(10)
    assert len(raised) == 1
    assert time.monotonic() - started < 5
    assert not is_there(pid)
    with pytest.raises(EngineDead):
        one.problem(GOOD)


_ORPHAN = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
from test_grammar_rehearsal import ENDLESS, GOOD, Rehearsal, pid_of, table
one = Rehearsal(table, 60.0)
one.problem(GOOD)
threading.Thread(target=one.problem, args=(ENDLESS,), daemon=True).start()
time.sleep(0.3)
print(pid_of(one), flush=True)
time.sleep(60 if sys.argv[2] == "wait" else 0)
"""


@pytest.mark.parametrize("how", ["wait", "leave"])
def test_no_process_is_left_behind(how) -> None:
    """Neither when the first one is killed while the other compiles, nor when it just ends."""
    command = [sys.executable, "-c", _ORPHAN, str(Path(__file__).parent), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        pid = int(first.stdout.readline())
        if how == "wait":
            assert is_there(pid)
            first.kill()
        first.wait(20)
    assert eventually(lambda: not is_there(pid), 5.0)


def test_the_vocabulary_arrives_as_it_was() -> None:
    sent = TokenTable([b"ab", b"", b"\xff", b"c"], [3], [3, 1])
    assert TokenTable.from_arrays(sent.arrays()) == sent


# --- with the compiler in front of it -------------------------------------------------------


def test_nothing_hostile_is_compiled_in_this_process(monkeypatch) -> None:
    compiled = []
    usual = compiler.new_matcher

    def watched(tokens, text):
        compiled.append(text)
        return usual(tokens, text)

    monkeypatch.setattr(compiler, "new_matcher", watched)
    grammars = GrammarCompiler(Bytes(), 257, {256})
    grammars._rehearsal._seconds = 0.5
    for _ in range(2):
        with pytest.raises(RequestError, match=r"^response_format has a grammar that cannot be"):
            grammars.compile(StructuredOutputs(grammar=ENDLESS, param="response_format"))
    assert not compiled
    grammars.compile(StructuredOutputs(regex="ab"))
    assert len(compiled) == 1
    grammars.close()
    grammars.compile(StructuredOutputs(regex="ab"))
    assert len(compiled) == 1, "what is cached needs no process"
    with pytest.raises(EngineDead):
        grammars.compile(StructuredOutputs(regex="b"))


_DEADLY = """
import sys
sys.path.insert(0, sys.argv[1])
from test_grammar_rehearsal import SCHEMA, Bytes, GrammarCompiler, RequestError, StructuredOutputs
from test_grammar_rehearsal import lark
lark.misread_schema = lambda schema: None  # as if nobody knew these numbers
try:
    GrammarCompiler(Bytes(), 257, {256}).compile(StructuredOutputs(json=SCHEMA))
except RequestError as error:
    print(error)
"""


def test_a_schema_that_overflows_the_stack_does_not_end_this_process() -> None:
    assert lark.misread_schema(SCHEMA) is not None
    command = [sys.executable, "-c", _DEADLY, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    assert "more memory or recursion" in done.stdout
