"""Oracle: decode everything at once, then cut at the stop string that is complete first."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser.engine.checkpoints.tokenizer_settings import TokenizerSettings
from faser.engine.text.detokenizer import DetokenizedText, Detokenizer
from faser.engine.text.tokenizer import Tokenizer
from tests.engine.text.vocabularies import byte_level_core, sentencepiece_core

BYTE_LEVEL = Tokenizer(byte_level_core(), TokenizerSettings())
SENTENCEPIECE = Tokenizer(sentencepiece_core(), TokenizerSettings())
TOKENIZERS = {"byte-level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE}

# Few characters, so that stop strings are found, and overlap themselves and each other.
_STOPS = st.lists(st.text(alphabet="aab\ufffd☃", min_size=1, max_size=5), max_size=3).map(tuple)


def detokenizer(tokenizer: Tokenizer = BYTE_LEVEL, **options: object) -> Detokenizer:
    defaults: dict[str, object] = {
        "stop": (),
        "include_stop": False,
        "skip_special_tokens": True,
        "prompt_token_ids": (),
    }
    return Detokenizer(tokenizer, **(defaults | options))  # type: ignore[arg-type]


def cut(text: str, stop: tuple[str, ...], include: bool, allowed_from: int) -> tuple[str, str | None]:
    """The text up to the first stop string that ends after the first allowed_from characters."""
    for end in range(allowed_from + 1, len(text) + 1):
        found = [each for each in stop if text[:end].endswith(each)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def spellings(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Token ids: of text that stop strings like, of bytes that are no UTF-8, and any others."""
    pieces = ["a", "a", "b", "ab", " ", "☃", "🙂"]
    sensible = st.sampled_from(pieces).map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    anything = st.integers(0, tokenizer.vocab_size).map(lambda each: [each])
    return st.lists(st.one_of(sensible, sensible, sensible, anything), max_size=12).map(
        lambda parts: list(itertools.chain(*parts))
    )


@st.composite
def streams(draw: st.DrawFn) -> tuple[Tokenizer, list[tuple[int, ...]]]:
    """A tokenizer and token ids, spread over pushes."""
    tokenizer = TOKENIZERS[draw(st.sampled_from(sorted(TOKENIZERS)))]
    ids = draw(spellings(tokenizer))
    borders = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    edges = [0, *borders, len(ids)]
    return tokenizer, [tuple(ids[start:end]) for start, end in itertools.pairwise(edges)]


@settings(max_examples=500)
@given(
    stream=streams(),
    stop=_STOPS,
    include=st.booleans(),
    skip=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_pieces_join_to_the_text_decoded_at_once_and_cut_at_the_stop(
    stream: tuple[Tokenizer, list[tuple[int, ...]]],
    stop: tuple[str, ...],
    include: bool,
    skip: bool,
    min_tokens: int,
) -> None:
    tokenizer, pushes = stream
    ids = [each for push in pushes for each in push]
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    ends = [settled_length(tokenizer, ids[: i + 1], skip) for i in range(len(ids))]
    # What the token before the min_tokens-th has settled is no longer a stop.
    allowed_from = (0, *ends)[max(min_tokens - 1, 0)] if min_tokens <= len(ids) else len(whole)
    text, stopped = cut(whole, stop, include, allowed_from)

    subject = detokenizer(
        tokenizer, stop=stop, include_stop=include, skip_special_tokens=skip, min_tokens=min_tokens
    )
    pieces: list[DetokenizedText] = []
    for at, push in enumerate(pushes):
        pieces.append(subject.push(push, finished=at == len(pushes) - 1))
        if pieces[-1].stop is not None:
            break
    assert ("".join(piece.text for piece in pieces), pieces[-1].stop) == (text, stopped)

    if stopped is None:
        assert [piece.num_tokens for piece in pieces] == [len(push) for push in pushes]
    else:
        counted = sum(piece.num_tokens for piece in pieces)
        stop_end = len(text) if include else len(text) + len(stopped)
        enough = [i + 1 for i, end in enumerate(ends) if end >= stop_end]
        assert counted == (enough[0] if enough else len(ids))


def settled_length(tokenizer: Tokenizer, ids: list[int], skip: bool) -> int:
    """How many characters these tokens have settled; an unfinished code point at their end is not settled."""
    special = {each for each in ids if tokenizer.is_special(each)} if skip else set()
    joined = b"".join(tokenizer.token_bytes(each) for each in ids if each not in special)
    unfinished = next((n for n in (3, 2, 1) if n <= len(joined) and is_beginning(joined[-n:])), 0)
    settled = joined[: len(joined) - unfinished].decode("utf-8", "replace")
    return len(settled[1:] if tokenizer.leading_spaces and settled.startswith(" ") else settled)


def is_beginning(part: bytes) -> bool:
    """Whether more bytes can make one code point of these. Brute force: what may follow depends on little."""
    tails = [
        bytes(tail)
        for n in (1, 2, 3)
        for tail in ([0x80] * n, [0x9F] + [0x80] * (n - 1), [0xBF] + [0x80] * (n - 1))
    ]
    return any(is_one_character(part + tail) for tail in tails)


def is_one_character(part: bytes) -> bool:
    try:
        return len(part.decode("utf-8")) == 1
    except UnicodeDecodeError:
        return False


@given(stream=streams(), stop=_STOPS)
def test_exactly_the_beginning_of_a_stop_is_held_back(
    stream: tuple[Tokenizer, list[tuple[int, ...]]], stop: tuple[str, ...]
) -> None:
    """Oracle: of all settled text, the longest ending with which some stop string begins."""
    tokenizer, pushes = stream
    subject, shown = detokenizer(tokenizer, stop=stop), ""
    ids: list[int] = []
    for push in pushes:
        piece = subject.push(push, finished=False)
        shown += piece.text
        ids += push
        if piece.stop is not None:
            break
        settled = tokenizer.decode(ids)[: settled_length(tokenizer, ids, skip=True)]
        held = max((n for each in stop for n in range(1, len(each)) if settled.endswith(each[:n])), default=0)
        assert shown == settled[: len(settled) - held]


def test_half_a_code_point_waits_for_the_other_half() -> None:
    first, *others, last = BYTE_LEVEL.encode("🙂")
    subject = detokenizer()
    assert subject.push((first, *others), finished=False).text == ""
    assert subject.push((last,), finished=False).text == "🙂"


def test_a_code_point_that_is_never_finished_ends_as_a_replacement() -> None:
    subject = detokenizer()
    first = BYTE_LEVEL.encode("🙂")[0]
    assert subject.push((first,), finished=False).text == ""
    assert subject.push((), finished=True).text == "\ufffd"


def test_a_code_point_begun_in_the_prompt_is_finished() -> None:
    ids = tuple(BYTE_LEVEL.encode("hi 🙂"))
    subject = detokenizer(prompt_token_ids=ids[:-1])
    assert subject.push(ids[-1:], finished=True).text == "🙂"


def test_the_first_word_keeps_its_space_when_it_continues_a_prompt() -> None:
    """Sentencepiece drops the first space of a text, but an answer is not the first of its text."""
    prompt = tuple(SENTENCEPIECE.encode("the cat", add_special_tokens=False))
    word = tuple(SENTENCEPIECE.encode("sat", add_special_tokens=False))
    assert detokenizer(SENTENCEPIECE, prompt_token_ids=prompt).push(word, finished=True).text == " sat"
    assert detokenizer(SENTENCEPIECE, prompt_token_ids=(1,)).push(word, finished=True).text == "sat"
    assert detokenizer(SENTENCEPIECE).push(word, finished=True).text == "sat"


def test_tokens_behind_the_one_that_completes_the_stop_do_not_count() -> None:
    ids = tuple(BYTE_LEVEL.encode("x", add_special_tokens=False)[0] for _ in range(5))
    piece = detokenizer(stop=("xx",)).push(ids, finished=False)
    assert piece == DetokenizedText(text="", stop="xx", num_tokens=2)


def test_a_stop_across_token_borders_is_cut_exactly() -> None:
    ids = [tuple(BYTE_LEVEL.encode(part)) for part in ("one EN", "D", " two")]
    subject = detokenizer(stop=("END",))
    assert subject.push(ids[0], finished=False).text == "one "
    ended = subject.push(ids[1] + ids[2], finished=False)
    assert ended == DetokenizedText(text="", stop="END", num_tokens=len(ids[1]))
    kept = detokenizer(stop=("END",), include_stop=True)
    assert kept.push(ids[0] + ids[1], finished=False).text == "one END"


def test_the_beginning_of_a_stop_is_shown_once_it_is_none() -> None:
    subject = detokenizer(stop=("END",))
    assert subject.push(tuple(BYTE_LEVEL.encode("EN")), finished=False).text == ""
    assert subject.push(tuple(BYTE_LEVEL.encode("T")), finished=False).text == "ENT"
    assert subject.push(tuple(BYTE_LEVEL.encode("EN")), finished=True).text == "EN"


@pytest.mark.parametrize(
    "text, stop, min_tokens, shown, found",
    [
        ("aaab!", ("aab",), 0, "a", "aab"),
        ("ababac!", ("abac",), 0, "ab", "abac"),
        ("aaaa", ("aa",), 0, "", "aa"),
        ("aaaa", ("aa",), 3, "a", "aa"),
        ("aaaa", ("aa",), 5, "aaaa", None),
        ("xabc", ("b", "ab"), 0, "x", "ab"),
        ("xabc", ("abcd", "b"), 0, "xa", "b"),
        ("xabc", ("abcd", "bcd"), 0, "xabc", None),
    ],
)
def test_stop_strings_that_overlap(
    text: str, stop: tuple[str, ...], min_tokens: int, shown: str, found: str | None
) -> None:
    """A token a character, all in one push."""
    ids = tuple(BYTE_LEVEL.encode(char)[0] for char in text)
    piece = detokenizer(stop=stop, min_tokens=min_tokens).push(ids, finished=True)
    assert (piece.text, piece.stop) == (shown, found)


def test_near_misses_of_a_long_stop_string_cost_no_second_look() -> None:
    """40,000 characters of near misses would take minutes if each began the search anew."""
    near_miss = "a" * 20_000 + "b"
    ids = tuple(BYTE_LEVEL.encode(near_miss * 2))
    subject = detokenizer(stop=("a" * 20_000 + "c",))
    assert subject.push(ids, finished=True).text == near_miss * 2


def test_special_tokens_are_shown_only_when_asked_for() -> None:
    ids = (*BYTE_LEVEL.encode("hi"), BYTE_LEVEL.encode("<|im_end|>")[0])
    assert detokenizer().push(ids, finished=True).text == "hi"
    assert detokenizer(skip_special_tokens=False).push(ids, finished=True).text == "hi<|im_end|>"
