"""What every tokenizer file comes down to: the bytes of each token, the control tokens, backends for plain text."""

import re
from dataclasses import dataclass

import tokenizers

SPACE = "▁"  # SentencePiece writes a space so

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class ControlToken:
    """A token with a meaning of its own. The flags say whether it swallows white space beside it in the text."""

    id: int
    strip_left: bool = False
    strip_right: bool = False


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A tokenizer's tables, whichever file they came from.

    `first` encodes plain text at the start of a text, `later` plain text behind a control token; they differ only
    for SentencePiece models that put a space before the first word alone. Neither knows the control tokens.
    """

    first: tokenizers.Tokenizer
    later: tokenizers.Tokenizer
    texts: list[str]  # each token as its file writes it
    pieces: list[bytes]  # what each token adds to the decoded text
    special: frozenset[int]  # ids that `skip_special` leaves out
    control: dict[str, ControlToken]  # by text
    prefix: tuple[int, ...]  # ids put before a prompt
    suffix: tuple[int, ...]  # ids put behind a prompt
    bos_id: int | None
    eos_id: int | None  # the one that chat templates write
    eos_ids: frozenset[int]  # all that end an answer
    chat_template: str | None
    strips_space: bool  # encoding puts a space before a text, so decoding takes one away


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's writing of bytes as characters: printable Latin-1 stands for itself, the rest for U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


def byte_level_piece(text: str) -> bytes:
    """The bytes that a token of a byte-level vocabulary stands for."""
    if all(char in BYTE_ALPHABET for char in text):
        return bytes(BYTE_ALPHABET[char] for char in text)
    return text.encode("utf-8", "replace")


def sentencepiece_piece(text: str) -> bytes:
    """The bytes that an ordinary token of a SentencePiece vocabulary stands for."""
    return text.replace(SPACE, " ").encode("utf-8", "replace")


def byte_fallback_piece(text: str) -> bytes | None:
    """The byte that a token such as `<0x0A>` stands for; None for any other token."""
    match = _BYTE_PIECE.fullmatch(text)
    return bytes([int(match[1], 16)]) if match else None
