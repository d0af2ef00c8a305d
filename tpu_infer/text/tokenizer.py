"""Text to token ids and back."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tpu_infer.errors import RequestError
from tpu_infer.text.chat import ChatTemplate
from tpu_infer.text.directory_vocabulary import read_directory
from tpu_infer.text.gguf_vocabulary import read_gguf
from tpu_infer.text.vocabulary import ControlToken, Vocabulary
from tpu_infer.types import check_text


class Tokenizer:
    """A model's tokenizer. Control tokens are found in a text only where the caller says so; it holds no state.

    Decoding joins the tokens' bytes: bytes that are no UTF-8 become U+FFFD, an id that the vocabulary does not
    have (a padded one) adds nothing, and no spaces are tidied.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lengths = _lengths_by_first_char(vocabulary.control)
        self._starts = re.compile(f"[{re.escape(''.join(self._lengths))}]") if self._lengths else None

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any]) -> Self:
        """From a GGUF file's metadata as plain Python values; raises ModelFileError or UnsupportedModelError."""
        return cls(read_gguf(fields))

    @classmethod
    def from_directory(cls, path: Path) -> Self:
        """From a directory with tokenizer.json; raises ModelNotFoundError, ModelFileError, UnsupportedModelError."""
        return cls(read_directory(path))

    @property
    def vocab_size(self) -> int:
        return len(self._vocabulary.pieces)

    @property
    def bos_id(self) -> int | None:
        return self._vocabulary.bos_id

    @property
    def add_bos(self) -> bool:
        """Whether a prompt of the model begins with BOS."""
        return bool(self._vocabulary.prefix)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends an answer: end of sequence, of turn, of message."""
        return self._vocabulary.eos_ids

    @property
    def chat_template(self) -> str | None:
        return self._vocabulary.chat_template

    @property
    def strips_space(self) -> bool:
        """Whether the text that begins a sequence has a space in its ids that is not in the text."""
        return self._vocabulary.strips_space

    def is_special(self, token: int) -> bool:
        return token in self._vocabulary.special

    def token_text(self, token: int) -> str:
        """A token's own text; U+FFFD stands for bytes that are a part of a character."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """A token's own bytes; none for an id that the vocabulary does not have."""
        pieces = self._vocabulary.pieces
        return pieces[token] if 0 <= token < len(pieces) else b""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text. `add_special` puts BOS and the like around it, as the model's file says.

        Control tokens written in the text stay plain text unless `parse_special`. Raises RequestError where the
        text holds a lone surrogate. Characters that the vocabulary can't write are left out.
        """
        check_text("prompt", text)
        ids = self._encode_parsed(text, {}) if parse_special else self._encode_spans([text])
        return [*self._vocabulary.prefix, *ids, *self._vocabulary.suffix] if add_special else ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, at_start: bool = True) -> str:
        """The text of some ids. `at_start` says that they begin a sequence: see `strips_space`."""
        data = self.join(ids, skip_special=skip_special)
        if at_start and self.strips_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def join(self, ids: Iterable[int], *, skip_special: bool) -> bytes:
        """The bytes of some ids, one after another."""
        special = self._vocabulary.special if skip_special else frozenset()
        return b"".join([self.token_bytes(i) for i in ids if i not in special])

    @cached_property
    def chat(self) -> ChatTemplate:
        """The model's chat template. Raises RequestError if it has none, ModelFileError if it does not compile."""
        vocabulary = self._vocabulary
        if vocabulary.chat_template is None:
            raise RequestError("This model has no chat template; send a plain prompt instead.", param="messages")
        return ChatTemplate(
            vocabulary.chat_template,
            bos_token="" if vocabulary.bos_id is None else vocabulary.texts[vocabulary.bos_id],
            eos_token="" if vocabulary.eos_id is None else vocabulary.texts[vocabulary.eos_id],
            control_tokens=frozenset(vocabulary.control),
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation. Control tokens come from the template alone, never out of a message.

        Nothing is put around the ids: the template writes BOS itself. Raises RequestError where the messages hold
        a lone surrogate or do not fit the template.
        """
        rendered = self.chat.render(messages, add_generation_prompt=add_generation_prompt)
        check_text("messages", rendered.text)
        return self._encode_parsed(rendered.masked, rendered.twins)

    def _encode_parsed(self, text: str, twins: Mapping[str, str]) -> list[int]:
        """Ids of a text whose control tokens count. `twins` are then undone: see `ChatTemplate`."""
        undo = str.maketrans(dict(twins))
        spans: list[str] = []
        controls: list[ControlToken] = []
        begin = 0
        for start, end, control in self._find_control(text):
            spans.append(_trimmed(text[begin:start], controls, control).translate(undo))
            controls.append(control)
            begin = end
        spans.append(_trimmed(text[begin:], controls, None).translate(undo))
        return self._encode_spans(spans, [control.id for control in controls])

    def _encode_spans(self, spans: Sequence[str], controls: Sequence[int] = ()) -> list[int]:
        """Ids of plain spans with control tokens between them."""
        ids: list[int] = []
        for number, span in enumerate(spans):
            if span:
                backend = self._vocabulary.later if number else self._vocabulary.first
                # Of the library's ways to encode, the batch one lets go of the interpreter lock.
                ids += backend.encode_batch_fast([span], add_special_tokens=False)[0].ids
            ids += controls[number : number + 1]
        return ids

    def _find_control(self, text: str) -> Iterator[tuple[int, int, ControlToken]]:
        """Start, end and token of each control token in a text: leftmost first, of several the longest."""
        if not self._starts:
            return
        end = 0
        for match in self._starts.finditer(text):
            start = match.start()
            if start < end:
                continue
            for length in self._lengths[text[start]]:
                control = self._vocabulary.control.get(text[start : start + length])
                if control is not None:
                    end = start + length
                    yield start, end, control
                    break


def _trimmed(span: str, before: Sequence[ControlToken], behind: ControlToken | None) -> str:
    """A span without the white space that the control tokens beside it swallow."""
    if before and before[-1].strip_right:
        span = span.lstrip()
    return span.rstrip() if behind is not None and behind.strip_left else span


def _lengths_by_first_char(control: Iterable[str]) -> dict[str, list[int]]:
    """For each character that begins a control token, the lengths there are, longest first."""
    lengths: defaultdict[str, set[int]] = defaultdict(set)
    for text in control:
        lengths[text[0]].add(len(text))
    return {char: sorted(found, reverse=True) for char, found in lengths.items()}
