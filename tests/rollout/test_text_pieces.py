"""Text that comes in pieces is the text of all tokens, wherever they are cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_rl.rollout.pieces as generation
from sparse_rl import generate
from sparse_rl.models import tiny_tokenizer
from sparse_rl.rollout.pieces import TextPieces
from tests.helpers.models import tiny

TOKENIZER = tiny_tokenizer()
TOKENIZER.eos_token = None  # responses run to their limit


def bytewise():
    """Every byte is a token, and 97 letters and pairs more; id 0 is special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(["<eos>", *alphabet])}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def with_byte_fallback():
    """Words with their spaces, as SentencePiece writes them, and a token for every byte; id 0 is special."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["▁the", "▁", "s", "▁▁", "ö", "."]
    vocabulary = {symbol: i for i, symbol in enumerate(["<eos>", *words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


BYTEWISE, FALLBACK = bytewise(), with_byte_fallback()


def of_characters(tokenizer, text: str) -> list[int]:
    if tokenizer is BYTEWISE:
        return tokenizer.encode(text)
    return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in text.encode()]


@st.composite
def token_lists(draw, tokenizer):
    """Characters of one to four bytes, whole or cut, among random tokens and special ones."""
    parts = st.one_of(
        st.text(st.sampled_from("aé你🙂\ufffd \n"), min_size=1, max_size=3).map(
            lambda text: of_characters(tokenizer, text)
        ),
        st.sampled_from("é你🙂").map(lambda text: of_characters(tokenizer, text)[:-1]),
        st.lists(
            st.integers(0, len(tokenizer) + 2), max_size=3
        ),  # unknown ids among them: a model may have more than its tokenizer
        st.just([0]),
    )
    return [token for part in draw(st.lists(parts, max_size=60)) for token in part]


@settings(deadline=None, max_examples=150)
@given(data=st.data(), name=st.sampled_from(["bytes", "fallback", "characters"]), context=st.sampled_from([2, 5, 64]))
def test_pieces_make_up_the_text(data, name, context):
    tokenizer = {"bytes": BYTEWISE, "fallback": FALLBACK, "characters": TOKENIZER}[name]
    tokens = data.draw(st.lists(st.integers(0, 97), max_size=200) if name == "characters" else token_lists(tokenizer))
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "_CONTEXT", context)
        text, told, at = TextPieces(tokenizer), "", 0
        while at < len(tokens):
            step = data.draw(st.integers(1, 9))
            told += text.add(tokens[at : at + step])
            assert expected.startswith(told)
            at += step
        assert told + text.rest() == expected


def test_whole_characters_are_not_held_back():
    said = "größer: 你好 🙂!"
    for tokenizer, certain in ((BYTEWISE, said), (FALLBACK, "")):  # bytes that are read as a whole wait for their end
        text = TextPieces(tokenizer)
        assert "".join(text.add([token]) for token in of_characters(tokenizer, said)) == certain
        assert certain + text.rest() == said
    text, spaces = TextPieces(FALLBACK), of_characters(FALLBACK, "  ")  # one of which is removed where a text begins
    assert [text.add([token]) for token in [*spaces, *of_characters(FALLBACK, "é")[:1], 1]] == [
        "",
        "",
        "",
        "\ufffd" * 3 + " the",
    ]
    text = TextPieces(FALLBACK)
    assert text.add(of_characters(FALLBACK, said)) == "" and text.add([1]) == said + " the"


def test_a_long_text_is_not_decoded_again_and_again(monkeypatch):
    asked, text, long = [], TextPieces(BYTEWISE), "a long text, 你好 " * 200
    original = generation.decode
    monkeypatch.setattr(
        generation, "decode", lambda tokenizer, tokens: asked.append(len(tokens)) or original(tokenizer, tokens)
    )
    assert "".join(text.add([token]) for token in BYTEWISE.encode(long)) + text.rest() == long
    assert max(asked) < 140


def test_a_long_silence_loses_no_space(monkeypatch):
    """A context without text would be the text's beginning, where SentencePiece writes no space."""
    monkeypatch.setattr(generation, "_CONTEXT", 2)
    text = TextPieces(FALLBACK)
    assert (
        "".join(text.add([token]) for token in [1, 1, 1, 1, 0, 0, 0, 0, 0, 2, 0, 0, 1, 3]) + text.rest()
        == "the the the the  thes"
    )


def test_a_models_characters_that_span_tokens_stream_alike():
    model = tiny("qwen2", vocab_size=300)
    for seed in range(5):
        options = dict(temperature=2.0, seed=seed, budget=16, interval=8, max_new_tokens=60)
        whole = generate(model, BYTEWISE, "größer", **options)
        pieces = list(generate(model, BYTEWISE, "größer", stream=True, **options))
        assert "\ufffd" in whole and "".join(pieces) == whole and len(pieces) > 5
