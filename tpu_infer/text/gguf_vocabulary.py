"""A vocabulary from the metadata of a GGUF file.

Two models of tokenizer are known: `gpt2`, byte-level BPE whose words are cut by the regular expressions that
`tokenizer.ggml.pre` names, and `llama`, SentencePiece BPE whose merges follow from the scores of the pieces.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from tpu_infer.errors import ModelFileError, UnsupportedModelError
from tpu_infer.text.vocabulary import (
    SPACE,
    ControlToken,
    Vocabulary,
    byte_fallback_piece,
    byte_level_piece,
    sentencepiece_piece,
)

_PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4  # always found in the text, whole, before anything else
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class PreTokenizer:
    """How a byte-level vocabulary cuts text into words: each expression cuts what the ones before it left."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token stays whole
    add_bos: bool = False  # unless the file says otherwise
    nfc: bool = False  # the text is brought to Unicode's composed form first


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _WORD_TAIL
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _WORD_TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

_LLAMA3_CUT = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": PreTokenizer((r"\p{N}", _GPT2)),
    "starcoder": PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe": _LLAMA3_CUT,
    "llama3": _LLAMA3_CUT,
    "llama-v3": _LLAMA3_CUT,
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),
    "deepseek-v3": PreTokenizer(_DEEPSEEK3),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
}


def read_gguf(fields: Mapping[str, Any]) -> Vocabulary:
    """Make a vocabulary of a GGUF file's metadata, given as plain Python values by their full keys.

    Raises ModelFileError where a field is missing or contradicts another, UnsupportedModelError for a kind of
    tokenizer, or a `pre`, that is not known here.
    """
    model = _field(fields, "model", str)
    if model == "gpt2":
        return _byte_level(fields)
    if model == "llama":
        return _sentencepiece(fields)
    raise UnsupportedModelError(
        f"The GGUF file's tokenizer model {model!r} is not known here; known are 'gpt2' and 'llama'."
    )


def _byte_level(fields: Mapping[str, Any]) -> Vocabulary:
    texts, types = _tokens(fields)
    pre = _pre_tokenizer(fields)
    vocab = _plain_vocab(texts, types)
    merges = _merges(fields, vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    backend.decoder = decoders.ByteLevel()
    _add_user_defined(backend, texts, types)
    pieces = [
        byte_level_piece(text) if kind == TokenType.NORMAL else text.encode("utf-8", "replace")
        for text, kind in zip(texts, types, strict=True)
    ]
    return _vocabulary(fields, backend, texts, types, pieces, add_bos=pre.add_bos, strips_space=False)


def _sentencepiece(fields: Mapping[str, Any]) -> Vocabulary:
    texts, types = _tokens(fields)
    scores = _list(fields, "scores", float)
    if len(scores) != len(texts):
        raise ModelFileError(f"The GGUF file has {len(texts)} tokens but {len(scores)} scores.")
    unknown = texts[_token_id(fields, "unknown", len(texts)) or 0]
    vocab = _plain_vocab(texts, types) | {unknown: texts.index(unknown)}
    merges = _merges_of_scores({text: scores[i] for text, i in vocab.items()})
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    add_space = _field(fields, "add_space_prefix", bool, True)
    to_pieces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), to_pieces]) if add_space else to_pieces
    _add_user_defined(backend, texts, types)
    pieces = [_sentencepiece_bytes(text, kind) for text, kind in zip(texts, types, strict=True)]
    return _vocabulary(fields, backend, texts, types, pieces, add_bos=True, strips_space=add_space)


def _sentencepiece_bytes(text: str, kind: int) -> bytes:
    byte = byte_fallback_piece(text) if kind == TokenType.BYTE else None
    if byte is not None:
        return byte
    return sentencepiece_piece(text) if kind == TokenType.NORMAL else text.encode("utf-8", "replace")


def _merges_of_scores(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The pairs that make each piece: best piece first, and of its pairs the one with the longest left part."""
    merges: list[tuple[str, str]] = []
    for piece in sorted(scores, key=scores.__getitem__, reverse=True):
        for cut in range(len(piece) - 1, 0, -1):
            left = piece[:cut]
            if left in scores and piece[cut:] in scores:
                merges.append((left, piece[cut:]))
    return merges


def _vocabulary(
    fields: Mapping[str, Any],
    backend: tokenizers.Tokenizer,
    texts: list[str],
    types: list[int],
    pieces: list[bytes],
    *,
    add_bos: bool,
    strips_space: bool,
) -> Vocabulary:
    bos = _token_id(fields, "bos", len(texts))
    ends = {name: _token_id(fields, name, len(texts)) for name in ("eos", "eot", "eom")}
    hidden = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.UNUSED)
    return Vocabulary(
        first=backend,
        later=backend,
        texts=texts,
        pieces=pieces,
        special=frozenset(i for i, kind in enumerate(types) if kind in hidden),
        control={text: ControlToken(i) for i, text in enumerate(texts) if text and types[i] == TokenType.CONTROL},
        prefix=_added(fields, "add_bos_token", add_bos, bos),
        suffix=_added(fields, "add_eos_token", False, ends["eos"]),
        bos_id=bos,
        eos_id=ends["eos"],
        eos_ids=frozenset(i for i in ends.values() if i is not None),
        chat_template=_field(fields, "tokenizer.chat_template", str, None),
        strips_space=strips_space,
    )


def _added(fields: Mapping[str, Any], key: str, default: bool, token: int | None) -> tuple[int, ...]:
    if not _field(fields, key, bool, default):
        return ()
    if token is None:
        raise ModelFileError(f"The GGUF file asks for {_PREFIX}{key} but names no such token.")
    return (token,)


def _tokens(fields: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    texts = _list(fields, "tokens", str)
    types = _list(fields, "token_type", int)
    if not texts or len(texts) != len(types):
        raise ModelFileError(f"The GGUF file has {len(texts)} tokens but {len(types)} token types.")
    return texts, types


def _plain_vocab(texts: list[str], types: list[int]) -> dict[str, int]:
    """What plain text may become. Control tokens are left out, so that no spelling of them in a text can reach them."""
    plain = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.BYTE)
    return {text: i for i, text in enumerate(texts) if types[i] in plain}


def _add_user_defined(backend: tokenizers.Tokenizer, texts: list[str], types: list[int]) -> None:
    wanted = [text for text, kind in zip(texts, types, strict=True) if kind == TokenType.USER_DEFINED and text]
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in wanted])


def _merges(fields: Mapping[str, Any], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(_list(fields, "merges", str)):
        left, _, right = line.partition(" ")
        if not (left in vocab and right in vocab and left + right in vocab):
            raise ModelFileError(f"Merge {number} of the GGUF file's tokenizer is not made of its tokens.")
        merges.append((left, right))
    return merges


def _pre_tokenizer(fields: Mapping[str, Any]) -> PreTokenizer:
    name = _field(fields, "pre", str)
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedModelError(f"The GGUF file's pre-tokenizer {name!r} is not known here; known are {known}.")
    return PRE_TOKENIZERS[name]


def _token_id(fields: Mapping[str, Any], name: str, size: int) -> int | None:
    key = "unknown_token_id" if name == "unknown" else f"{name}_token_id"
    token = _field(fields, key, int, None)
    if token is not None and not 0 <= token < size:
        raise ModelFileError(f"The GGUF file's {_PREFIX}{key} is {token}, but it has {size} tokens.")
    return token


_REQUIRED = object()


def _field(fields: Mapping[str, Any], key: str, kind: type, default: Any = _REQUIRED) -> Any:
    full = key if key.startswith("tokenizer.") else _PREFIX + key
    if full not in fields:
        if default is _REQUIRED:
            raise ModelFileError(f"The GGUF file has no {full}; it does not say how to tokenise.")
        return default
    if not isinstance(fields[full], kind):
        raise ModelFileError(f"The GGUF file's {full} is a {type(fields[full]).__name__}, not a {kind.__name__}.")
    return fields[full]


def _list[T](fields: Mapping[str, Any], key: str, kind: type[T]) -> list[T]:
    values = _field(fields, key, list)
    if not all(isinstance(value, kind) for value in values):
        raise ModelFileError(f"The GGUF file's {_PREFIX}{key} is not a list of {kind.__name__}.")
    return values
