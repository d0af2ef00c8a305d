"""Chat templates: a conversation becomes the text that the model was trained on.

Control tokens must come from the template, never out of a message. So before rendering, every character of the
messages that begins or ends a control token is replaced by a *twin*, a private-use character that occurs nowhere
else; the tokenizer looks for control tokens in the rendered text with the twins in it, and undoes them afterwards.
A spelling in a message, in one piece or in several that the template joins, has no true first or last character.

Twins are as long as what they stand for and are not white space, so trimming, slicing and lengths are unharmed. A
template may also look for a literal such as `</think>` in a message: where such a literal stands in a message it
keeps its characters, if it neither holds, is part of, nor overlaps a control token.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tpu_infer.errors import ModelFileError, RequestError

MAX_DEPTH = 64  # of lists and objects within a message

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


@dataclass(frozen=True)
class RenderedChat:
    """A rendered conversation. `masked` has twins where `text` has the characters of messages they stand for."""

    masked: str
    twins: Mapping[str, str]  # twin -> character

    @property
    def text(self) -> str:
        return self.masked.translate(str.maketrans(dict(self.twins)))


class ChatTemplate:
    """One compiled template, in Jinja's immutable sandbox with the helpers that model makers use.

    Raises ModelFileError if the source does not compile.
    """

    def __init__(self, source: str, *, bos_token: str, eos_token: str, control_tokens: frozenset[str]) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
            raise ModelFileError(f"The model's chat template does not compile: {error}") from None
        self._source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._masked_chars = {char for token in control_tokens for char in (token[0], token[-1])}
        self._literals = {c.value for c in tree.find_all(nodes.Const) if isinstance(c.value, str)}
        kept = sorted((c for c in self._literals if self._may_stand(c, control_tokens)), key=len, reverse=True)
        self._maskable = re.compile("|".join(map(re.escape, [*kept, *sorted(self._masked_chars)])) or "(?!)")

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> RenderedChat:
        """Render a conversation, its answer still to come if `add_generation_prompt`.

        Raises RequestError where the template refuses the messages, or can't be filled with them.
        """
        twins = self._twins(messages)
        try:
            text = self._template.render(
                messages=_map_strings(list(messages), lambda string: self._mask(string, twins)),
                add_generation_prompt=add_generation_prompt,
                tools=None,  # many templates ask whether it is none, not whether it is defined
                documents=None,
                **self._tokens,
            )
        except _RENDER_ERRORS as error:
            raise RequestError(self._explain(error), param="messages") from None
        return RenderedChat(text, {twin: char for char, twin in twins.items()})

    def _may_stand(self, literal: str, control_tokens: Iterable[str]) -> bool:
        """Whether a literal of the template may keep its characters in a message, as the module's text says."""
        if not any(char in literal for char in self._masked_chars):
            return False
        return not any(_touch(literal, token) for token in control_tokens)

    def _twins(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """A private-use character for each masked one, such that neither messages nor template hold it."""
        taken = {char for string in _strings(messages) for char in string if _is_private(char)}
        taken.update(char for char in self._source if _is_private(char))
        free = (chr(code) for code in chain(*_PRIVATE_USE) if chr(code) not in taken)
        twins = dict(zip(sorted(self._masked_chars), free, strict=False))
        if len(twins) < len(self._masked_chars):
            raise RequestError("The messages hold every private-use character there is.", param="messages")
        return twins

    def _mask(self, string: str, twins: Mapping[str, str]) -> str:
        return self._maskable.sub(lambda match: twins.get(match[0], match[0]), string)

    def _explain(self, error: Exception) -> str:
        """The template's own words if they are only its own: an error must not echo a prompt."""
        if isinstance(error, _RefusedError) and str(error) in self._literals:
            return f"The model's chat template refuses these messages: {error}"
        return "The model's chat template can't be filled with these messages: check their roles, order and content."


class _RefusedError(jinja2.TemplateError):
    """A template called raise_exception."""


_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; for serving it is only its content."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment


def _refuse(message: str) -> NoReturn:
    raise _RefusedError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter would escape `<`, `>` and `&` for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _touch(literal: str, token: str) -> bool:
    """Whether one string holds the other, or an end of one is a beginning of the other."""
    if literal in token or token in literal:
        return True
    lengths = range(1, min(len(literal), len(token)))
    return any(literal[-n:] == token[:n] or literal[:n] == token[-n:] for n in lengths)


def _is_private(char: str) -> bool:
    return any(ord(char) in codes for codes in _PRIVATE_USE)


def _strings(value: Any) -> Iterator[str]:
    found: list[str] = []
    _map_strings(value, lambda string: found.append(string) or string)
    return iter(found)


def _map_strings(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """A copy of a JSON value with every string in it changed, keys too."""
    if depth > MAX_DEPTH:
        raise RequestError(f"The messages are nested deeper than {MAX_DEPTH} levels.", param="messages")
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): _map_strings(item, change, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change, depth + 1) for item in value]
    return value
