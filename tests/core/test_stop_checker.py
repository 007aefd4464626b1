"""Behaviour 1: stop strings, wherever the pieces of text break."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadframe.tokenizer import StopChecker


def run(stop, pieces, include=False):
    """Returns (texts emitted by each push, what flush gives, the stop string found)."""
    checker, emitted = StopChecker(stop, include), []
    for piece in pieces:
        text, matched = checker.push(piece)
        emitted.append(text)
        if matched is not None:
            return emitted, "", matched
    return emitted, checker.flush(), None


def test_a_stop_string_over_several_tokens_never_leaks():
    assert run(["CDEF"], ["AB", "C", "DE", "F"]) == (["AB", "", "", ""], "", "CDEF")


def test_the_stop_string_can_be_included_and_nothing_after_it():
    emitted, _, matched = run(["CDEF"], ["AB", "C", "DE", "FGH"], include=True)
    assert ("".join(emitted), matched) == ("ABCDEF", "CDEF")


def test_what_was_held_back_comes_out_when_it_is_not_a_stop_string():
    assert run(["CDEF"], ["AB", "CD", "X"]) == (["AB", "", "CDX"], "", None)


def test_what_was_held_back_comes_out_at_the_end():
    assert run(["CDEF"], ["AB", "CD"]) == (["AB", ""], "CD", None)


def test_a_stop_string_in_the_middle_of_a_token_cuts_the_rest():
    assert run(["CDEF"], ["ABxCDEFyz"]) == (["ABx"], "", "CDEF")


def test_no_more_is_held_back_than_may_become_a_stop_string():
    assert run(["CDEF"], ["ABC"])[0] == ["AB"]
    assert run(["CDEF"], ["ABX"])[0] == ["ABX"]
    assert run(["aab"], ["aaa"])[0] == ["a"]


def test_the_first_to_be_complete_wins_and_of_two_the_longer():
    assert run(["CDEF", "E"], ["ABCDEF"]) == (["ABCD"], "", "E")
    assert run(["EF", "DEF", "F"], ["ABCDEF"]) == (["ABC"], "", "DEF")


def test_without_stop_strings_text_passes_through():
    assert run([], ["AB", "", "CD"]) == (["AB", "", "CD"], "", None)


def test_a_stop_string_does_not_count_while_the_checker_is_not_armed():
    """Behaviour 14: before `min_tokens` the text goes on, stop string and all."""
    checker = StopChecker(["ab"])
    assert checker.push("xab", armed=False) == ("xab", None)
    assert checker.push("a", armed=False) == ("", None)
    assert checker.push("b") == ("", "ab")


def test_an_overlap_is_kept_when_a_match_did_not_count():
    checker = StopChecker(["aa"])
    assert checker.push("aa", armed=False) == ("a", None)
    assert checker.push("a") == ("", "aa")


TEXT = st.text("ab", max_size=24)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def brute_force(stop, text, include):
    """The shortest prefix that ends with a stop string, of those the longest stop string."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(stop=STOPS, text=TEXT, include=st.booleans(), cuts=st.lists(st.integers(0, 24)))
def test_every_cutting_gives_what_brute_force_gives(stop, text, include, cuts):
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    emitted, rest, matched = run(stop, pieces, include)
    assert ("".join(emitted) + rest, matched) == brute_force(stop, text, include)


@given(stop=STOPS, text=TEXT)
def test_held_back_text_is_the_longest_beginning_of_a_stop_string(stop, text):
    checker = StopChecker(stop)
    emitted, matched = checker.push(text)
    if matched is None:
        starts = [s[:k] for s in stop for k in range(len(s)) if text.endswith(s[:k])]
        assert text[len(emitted) :] == max(starts, key=len, default="")


@pytest.mark.parametrize("length", [2000])
def test_a_long_stop_string_costs_constant_time_a_character(length):
    checker = StopChecker(["a" * length + "b"])
    steps = [len(checker.push("a")[0]) for _ in range(2 * length)]
    assert sum(steps) == length
