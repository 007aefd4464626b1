"""Grammars over small vocabularies, against what a regex says of every spelling."""

import re
import subprocess
import sys
import threading

import numpy as np
import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from leadframe.errors import RequestError
from leadframe.grammar import compiler, matcher
from leadframe.grammar.compiler import GrammarCompiler as Compiler
from leadframe.structured_outputs import StructuredOutputs
from leadframe.tokenizer import Tokenizer
from leadframe.tokenizer.gguf_vocabulary import build_gguf_tokenizer


class Words:
    """A vocabulary of a few byte strings; None is a special token."""

    def __init__(self, tokens):
        self.tokens, self.vocab_size = tokens, len(tokens)

    def token_bytes(self, token_id):
        known = token_id < self.vocab_size and self.tokens[token_id] is not None
        return self.tokens[token_id] if known else b""

    def is_special(self, token_id):
        return self.tokens[token_id] is None


LETTERS = [b"a", b"b", b"c", b"ab", b"abc", b"a", b"", b"cc", None, None, b"\xc3", b"\xa9", b"1"]
EOS = 9
V = 40
"""The logits are wider than the vocabulary and no multiple of 32."""


def compiler_of(vocabulary, vocab_size, eos_token_ids):
    """Compiles in this process alone; `test_grammar_rehearsal.py` has the other one."""
    return Compiler(vocabulary, vocab_size, eos_token_ids, rehearse=False)


@pytest.fixture
def grammars():
    return compiler_of(Words(LETTERS), V, {EOS})


def allowed(constraint, vocab=V):
    """The ids that are not masked; every bit past the vocabulary has to be."""
    mask = constraint.mask()
    assert (mask.dtype, mask.shape) == (np.int32, (-(-vocab // 32),))
    free = np.unpackbits((~mask).view(np.uint8), bitorder="little")
    assert not free[vocab:].any()
    return set(np.flatnonzero(free).tolist())


def spells(ids):
    return b"".join(LETTERS[i] or b"" for i in ids)


def test_the_mask_is_what_can_go_on_and_eos_what_may_end(grammars):
    constraint = grammars.compile(StructuredOutputs(regex="ab+c?"))
    assert allowed(constraint) == {0, 3, 4, 5}
    constraint.advance([0])
    assert allowed(constraint) == {1}
    constraint.advance([0, 1])
    assert allowed(constraint) == {1, 2, EOS}
    assert not constraint.is_complete
    constraint.advance([0, 1, 2])
    assert constraint.is_complete
    assert constraint.error is None


def test_eos_ends_what_could_go_on(grammars):
    constraint = grammars.compile(StructuredOutputs(regex="a+"))
    constraint.advance([0, EOS])
    assert constraint.is_complete


def test_ignored_eos_is_withheld_while_anything_else_can_follow(grammars):
    constraint = grammars.compile(StructuredOutputs(regex="ab*"), ignore_eos=True)
    constraint.advance([0])
    assert allowed(constraint) == {1}
    empty = grammars.compile(StructuredOutputs(regex="(ab)?{0}"), ignore_eos=True)
    assert allowed(empty) == {EOS}


def test_bytes_of_one_character_may_come_in_two_tokens(grammars):
    constraint = grammars.compile(StructuredOutputs(regex="é"))
    assert allowed(constraint) == {10}
    constraint.advance([10])
    assert allowed(constraint) == {11}


PARTS = st.sampled_from(["a", "b", "c", "(ab|c)", "[ac]", "b*", "(abc)+", "a?", "c{1,2}"])


@given(st.lists(PARTS, min_size=1, max_size=4), st.data())
def test_masks_agree_with_regexes(parts, data):
    """A token is allowed if and only if some text that matches begins so."""
    pattern = "".join(parts)
    grammars = compiler_of(Words(LETTERS), V, {EOS})
    constraint = grammars.compile(StructuredOutputs(regex=pattern))
    said, output = "", []
    while not constraint.is_complete and len(said) < 8:
        want = {
            i
            for i, token in enumerate(LETTERS)
            if token and token.isalpha() and begins(pattern, said + token.decode())
        }
        want |= {EOS} if re.fullmatch(pattern, said) else set()
        assert allowed(constraint) == want
        output.append(data.draw(st.sampled_from(sorted(want))))
        constraint.advance(output)
        said = spells(output).decode()
        assert constraint.is_complete == (output[-1] == EOS or is_final(pattern, said))


def begins(pattern, text):
    """Whether some text that matches begins so."""
    return regex.fullmatch(pattern, text, partial=True) is not None


def is_final(pattern, text):
    """Whether a text matches and nothing longer that begins with it does."""
    return bool(re.fullmatch(pattern, text)) and not any(begins(pattern, text + c) for c in "abc")


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_state_depends_on_the_output_alone(steps):
    """Reading it token by token, in pieces, or again, comes to the same."""
    grammars = compiler_of(Words(LETTERS), V, {EOS})
    wanted = StructuredOutputs(regex="[abc]{12}")
    output = [0, 1, 2, 4, 3, 1, 1, 0]
    pieces, whole = grammars.compile(wanted), grammars.compile(wanted)
    end = 0
    for step in steps:
        end = min(end + step, len(output))
        pieces.advance(output[:end])
        pieces.mask()
        pieces.advance(output[:end])
    whole.advance(output[:end])
    assert allowed(pieces) == allowed(whole)
    assert pieces.error is whole.error is None


def test_a_token_that_was_not_allowed_is_an_error(grammars):
    constraint = grammars.compile(StructuredOutputs(choice=["abc"]))
    constraint.advance([2])
    assert "cannot go on" in constraint.error
    assert not constraint.is_complete
    assert not constraint.mask().any()


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "["},
        {"regex": "(((("},
        {"regex": "(?=a)b"},
        {"regex": "a[^\\s\\S]"},
        {"regex": "zebra"},
        {"json": {"type": "nope"}},
        {"json": {"$ref": "#"}},
        {"json": {"$ref": "http://example.org/schema"}},
        {"json": {"allOf": [{"type": "string"}, {"type": "null"}]}},
        {"grammar": 'root ::= "a"'},
        {"grammar": "start: missing"},
        {"grammar": "start: " + "(" * 2000 + '"a"' + ")" * 2000},
    ],
)
def test_what_cannot_be_matched_is_refused_and_changes_nothing(grammars, fields):
    for _ in range(2):
        with pytest.raises(RequestError, match="cannot be used") as caught:
            grammars.compile(StructuredOutputs(**fields, param="response_format"))
        assert caught.value.param == "response_format"
        assert len(str(caught.value)) < 400
        good = grammars.compile(StructuredOutputs(choice=["a", "cc"]))
        assert allowed(good) == {0, 2, 5, 7}


def test_choices_are_texts_not_patterns(grammars):
    tokens = compiler_of(Words([b'"', b"\\", b"|", b"a", None]), 5, {4})
    constraint = tokens.compile(StructuredOutputs(choice=['"a', "\\", "|"]))
    assert allowed(constraint, 5) == {0, 1, 2}
    constraint.advance([0])
    assert allowed(constraint, 5) == {3}


def test_digits_are_ascii():
    grammars = compiler_of(Words([b"1", "٣".encode(), None]), 3, {2})
    assert allowed(grammars.compile(StructuredOutputs(regex=r"\d")), 3) == {0}


def test_json_cannot_be_blank_for_ever():
    """Blanks are a space, or a new line with at most 20 more."""
    letters = Words([bytes([i]) for i in range(128)] + [b"\n" + b" " * 8, None])
    grammars = compiler_of(letters, 130, {129})
    constraint = grammars.compile(StructuredOutputs(json_object=True))
    key, blank, line = {ord("}"), ord('"')}, {ord(" ")}, {ord("\n"), 128}
    constraint.advance([ord("{")])
    assert allowed(constraint, 130) == key | blank | line
    spaced = grammars.compile(StructuredOutputs(json_object=True))
    spaced.advance([ord("{"), ord(" ")])
    assert allowed(spaced, 130) == key
    constraint.advance([ord("{"), 128, *[32] * 11])
    assert allowed(constraint, 130) == key | {ord(" "), ord("\t")}
    constraint.advance([ord("{"), 128, *[32] * 12])
    assert allowed(constraint, 130) == key


def test_special_tokens_are_not_the_text_that_names_them():
    class Spelled(Words):
        def token_bytes(self, token_id):
            return b"</s>" if token_id == 1 else super().token_bytes(token_id)

    grammars = compiler_of(Spelled([b"<", None, b"/s>"]), 3, {1})
    assert allowed(grammars.compile(StructuredOutputs(choice=["</s>"])), 3) == {0}


@pytest.mark.parametrize("vocab", [32, 64, 12])
def test_models_without_an_end_token(vocab):
    """The stand-in for it is past the logits, wherever a word ends."""
    grammars = compiler_of(Words(LETTERS), vocab, ())
    constraint = grammars.compile(StructuredOutputs(regex="ab*"))
    assert allowed(constraint, vocab) == {0, 3, 5}
    constraint.advance([0])
    assert allowed(constraint, vocab) == {1}


def test_a_full_lexer_of_others_does_not_fail_a_request(monkeypatch):
    """What one request filled must not decide how another ends, nor must the cache keep it."""
    monkeypatch.setattr(matcher, "_MAX_LEXER_STATES", 300)
    wanted = StructuredOutputs(regex="(.*a.{12}b){2}c")
    grammars = compiler_of(Words(LETTERS), V, {EOS})
    rng = np.random.default_rng(0)
    greedy, modest = grammars.compile(wanted), grammars.compile(wanted)
    output = []
    while greedy.error is None:
        output.append(int(rng.integers(0, 3)))
        greedy.advance(output)
        greedy.mask()
        assert len(output) < 2000
    assert grammars.known(wanted, ignore_eos=False) is None, "the full one is forgotten"
    assert allowed(modest)
    modest.advance([0, 1])
    assert allowed(modest)
    assert modest.error is None
    assert allowed(grammars.compile(wanted))


def test_the_work_of_one_token_is_limited(grammars, monkeypatch) -> None:
    """It is done in the engine's thread, where nothing could end it."""
    wanted = StructuredOutputs(regex="(.*a.{12}b){2}c")
    assert not grammars.compile(wanted).error
    monkeypatch.setitem(matcher._LIMITS, "step_lexer_fuel", 1)
    tight = compiler_of(Words(LETTERS), V, {EOS})
    with pytest.raises(RequestError, match="nothing can match it"):
        tight.compile(wanted)


def test_the_cache_is_bounded_and_keeps_what_is_used(grammars, monkeypatch):
    monkeypatch.setattr(compiler, "_MAX_COMPILED", 3)
    for i in range(1, 6):
        grammars.compile(StructuredOutputs(regex=f"a{{{i}}}"))
        grammars.compile(StructuredOutputs(regex="a{1}"))
    assert [text for _, text in grammars._compiled] == ["a{4}", "a{5}", "a{1}"]
    assert grammars.known(StructuredOutputs(regex="a{2}"), ignore_eos=False) is None
    assert grammars.known(StructuredOutputs(regex="a{5}"), ignore_eos=False) is not None


def test_requests_of_one_grammar_do_not_move_each_other(grammars):
    wanted = StructuredOutputs(regex="ab*c")
    first, second, third = (grammars.compile(wanted) for _ in range(3))
    first.advance([0])
    second.advance([0, 1])
    fourth = grammars.compile(wanted)
    assert allowed(first) == allowed(second) == {1, 2}
    assert allowed(third) == allowed(fourth) == {0, 3, 4, 5}
    assert first.error is second.error is None


def test_kinds_with_the_same_text_are_different_constraints(grammars):
    grammars.compile(StructuredOutputs(regex="a|b"))
    with pytest.raises(RequestError, match="grammar"):
        grammars.compile(StructuredOutputs(grammar="a|b"))


def test_threads_may_compile_at_once(grammars):
    found = []

    def work(i):
        found.append(allowed(grammars.compile(StructuredOutputs(regex=f"ab{{{i % 3 + 1}}}"))))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    assert all(one <= {0, 3, 5} for one in found)


def test_without_the_library_the_command_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    grammars = compiler_of(Words(LETTERS), V, {EOS})
    with pytest.raises(RequestError, match="pip install 'llguidance>=") as caught:
        grammars.compile(StructuredOutputs(regex="a"))
    assert caught.value.param == "structured_outputs"


def test_without_a_tokenizer_it_is_refused():
    with pytest.raises(RequestError, match="tokenizer"):
        compiler_of(None, V, {EOS}).compile(StructuredOutputs(regex="a"))


_CHAINS = """
import sys
from leadframe.errors import RequestError
from leadframe.grammar import GrammarCompiler
from leadframe.structured_outputs import StructuredOutputs

class Bytes:
    vocab_size = 257
    def token_bytes(self, i): return bytes([i]) if i < 256 else b""
    def is_special(self, i): return i == 256

rules = "start: a0\\n" + "\\n".join(f"a{i}:a{i + 1}?" for i in range(4500)) + '\\na4500:"z"'
links = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(1400)}
schema = {"$ref": "#/$defs/a0", "$defs": {**links, "a1400": {"type": "null"}}}
for fields in ({"grammar": rules}, {"json": schema}):
    try:
        GrammarCompiler(Bytes(), 257, {256}, rehearse=False).compile(StructuredOutputs(**fields))
        print("compiled")
    except RequestError as error:
        print("refused", error)
"""


def test_a_chain_of_thousands_of_rules_does_not_end_the_process():
    """On a usual stack the library overflows it, and the process is gone."""
    done = subprocess.run(
        [sys.executable, "-c", _CHAINS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert len(done.stdout.splitlines()) == 2


def test_sentence_pieces_and_their_byte_tokens():
    """A mark is a space, and a byte token is the byte, as in the text that comes of them."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁a", "▁", "a", "b"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3, *([6] * 256), 1, 1, 1, 1],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
    }
    tokenizer = Tokenizer(*build_gguf_tokenizer(metadata))
    grammars = compiler_of(tokenizer, len(pieces), {2})
    names = {name: pieces.index(name) for name in ("<0x20>", "<0x61>", "▁a", "▁", "a")}
    constraint = grammars.compile(StructuredOutputs(choice=[" a"]))
    assert allowed(constraint, len(pieces)) == {names["<0x20>"], names["▁"], names["▁a"]}
    constraint.advance([names["▁"]])
    assert allowed(constraint, len(pieces)) == {names["a"], names["<0x61>"]}
    constraint.advance([names["▁"], names["<0x61>"]])
    assert constraint.is_complete
