"""Decode tokens that come one by one into pieces of text, and look for stop strings."""

from __future__ import annotations

import re
from collections.abc import Sequence

_CONTEXT = 64  # earlier tokens that are decoded again together with new ones


def decode(tokenizer, tokens: list[int]) -> str:
    """Decode without cleaning up spaces, because a stream could not remove them later."""
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class TextPieces:
    """Returns the text of tokens as far as it is certain: `add(...)` + ... + `rest()` is the whole text.

    Text that later tokens can change is held back: a character whose bytes are not complete (it reads as U+FFFD), and,
    if the vocabulary has tokens for single bytes, a run of such tokens, which is decoded as a whole.
    """

    def __init__(self, tokenizer):
        self.tokenizer, self.special = tokenizer, set(tokenizer.all_special_ids)
        self.tokens: list[int] = []  # all tokens; the last ones of a long text
        self.told = 0  # characters of their text that have been returned

    def add(self, tokens: list[int]) -> str:
        self.tokens += tokens
        if self.in_bytes():
            return ""
        text = decode(self.tokenizer, self.tokens)
        certain = text.rstrip("\ufffd")
        piece = certain[self.told :]
        self.told = max(self.told, len(certain))
        if len(certain) == len(text):
            self.forget()
        return piece

    def rest(self) -> str:
        return decode(self.tokenizer, self.tokens)[self.told :]

    def in_bytes(self) -> bool:
        """Whether the last token, apart from special and unknown ones, stands for a single byte."""
        for token in reversed(self.tokens):
            if token not in self.special and (name := self.tokenizer.convert_ids_to_tokens(token)) is not None:
                return re.fullmatch(r"<0x[0-9A-F]{2}>", name) is not None
        return False

    def forget(self) -> None:
        """Once all of a long text has been returned, keep only as many tokens as are needed to decode the next ones."""
        if len(self.tokens) < 2 * _CONTEXT:
            return
        context = decode(self.tokenizer, self.tokens[-_CONTEXT:])
        if context.strip():  # it now begins the text, where a tokenizer may omit a space
            self.tokens, self.told = self.tokens[-_CONTEXT:], len(context)


class StopText:
    """Looks for stop strings in the text of tokens that come one by one."""

    def __init__(self, tokenizer, strings: Sequence[str]):
        self.pieces, self.strings = TextPieces(tokenizer), tuple(strings)
        self.tail = ""  # of the text so far, as long as a string could begin in it
        self.matched: str | None = None  # the string that was found first

    def add(self, tokens: list[int]) -> bool:
        """Add tokens -> whether a stop string was found."""
        text = self.tail + self.pieces.add(tokens)
        found = [(text.find(string), string) for string in self.strings if string in text]
        self.matched = min(found)[1] if found else None
        self.tail = text[-(max(map(len, self.strings)) - 1) :] if max(map(len, self.strings)) > 1 else ""
        return bool(found)
