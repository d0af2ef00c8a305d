"""A vocabulary from a model directory: tokenizer.json, and what its neighbours say of BOS, EOS and chat templates."""

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from tpu_infer.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from tpu_infer.text.vocabulary import (
    ControlToken,
    Vocabulary,
    byte_fallback_piece,
    byte_level_piece,
    sentencepiece_piece,
)


def read_directory(path: Path) -> Vocabulary:
    """Make a vocabulary of tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja.

    Only the first must be there. Raises ModelNotFoundError without it, ModelFileError where a file is broken,
    UnsupportedModelError where the tokenizer is not a BPE of the byte-level or SentencePiece kind.
    """
    if not (path / "tokenizer.json").is_file():
        raise ModelNotFoundError(f"There is no tokenizer.json in {path}.")
    spec = _read_json(path / "tokenizer.json")
    config = _read_json(path / "tokenizer_config.json")
    vocab, added = _check(spec, path)
    for token in added:
        token["special"] |= _looks_like_control(token["content"])
    byte_level = _is_byte_level(spec)
    texts = _texts(vocab, added)
    ids = {text: i for i, text in enumerate(texts)}
    special = {token["content"]: token for token in added if token["special"]}
    prefix, suffix = _around(spec, config, ids)
    first = _plain_backend(spec)
    return Vocabulary(
        first=first,
        later=_without_first_space(spec) or first,
        texts=texts,
        pieces=_pieces(texts, frozenset(token["content"] for token in added), byte_level=byte_level),
        special=frozenset(ids[text] for text in special),
        control={
            text: ControlToken(token["id"], bool(token["lstrip"]), bool(token["rstrip"]))
            for text, token in special.items()
        },
        prefix=prefix,
        suffix=suffix,
        bos_id=ids.get(_token_text(config.get("bos_token"))),
        eos_id=ids.get(_token_text(config.get("eos_token"))),
        eos_ids=_eos_ids(path, config, ids),
        chat_template=_chat_template(path, config),
        strips_space=not byte_level and _strips_space(spec),
    )


def _check(spec: Mapping[str, Any], path: Path) -> tuple[dict[str, int], list[dict[str, Any]]]:
    model = spec.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        raise ModelFileError(f"{path / 'tokenizer.json'} holds no model with a vocabulary.")
    if model.get("type", "BPE") != "BPE":
        raise UnsupportedModelError(f"Tokenizers of type {model['type']!r} are not known here; known is 'BPE'.")
    added = spec.get("added_tokens", [])
    keys = {"id", "content", "special", "single_word", "lstrip", "rstrip"}
    if not all(keys <= token.keys() for token in added):
        raise ModelFileError(f"{path / 'tokenizer.json'} has an added token that lacks one of {sorted(keys)}.")
    if any(token["single_word"] for token in added if token["special"]):
        raise UnsupportedModelError("Special tokens that match single words only are not known here.")
    return model["vocab"], added


def _looks_like_control(text: str) -> bool:
    """Some files do not call their role tokens special (DeepSeek's `<｜User｜>`); a user must not write them either."""
    return text.startswith(("<|", "<｜")) and text.endswith(("|>", "｜>"))


def _is_byte_level(spec: Mapping[str, Any]) -> bool:
    kinds = {step["type"] for step in _steps(spec.get("decoder"), "decoders")}
    if "ByteLevel" in kinds:
        return True
    if kinds & {"ByteFallback", "Metaspace"}:
        return False
    raise UnsupportedModelError(
        f"A tokenizer with the decoder {sorted(kinds)} is not known here; known are ByteLevel, ByteFallback, Metaspace."
    )


def _steps(node: Any, children: str) -> Iterator[dict[str, Any]]:
    """A part of tokenizer.json as a flat list: sequences are opened."""
    if node is None:
        return
    if node["type"] == "Sequence":
        for child in node[children]:
            yield from _steps(child, children)
    else:
        yield node


def _texts(vocab: Mapping[str, int], added: list[dict[str, Any]]) -> list[str]:
    entries = [*vocab.items(), *((token["content"], token["id"]) for token in added)]
    texts = [""] * (max(i for _, i in entries) + 1)
    for text, i in entries:
        texts[i] = text
    return texts


def _pieces(texts: list[str], added: frozenset[str], *, byte_level: bool) -> list[bytes]:
    if byte_level:
        return [text.encode("utf-8", "replace") if text in added else byte_level_piece(text) for text in texts]
    return [byte_fallback_piece(text) or sentencepiece_piece(text) for text in texts]


def _plain_backend(spec: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of a tokenizer.json as it takes plain text: blind to special tokens, whatever the length."""
    backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    return backend


def _without_first_space(spec: Mapping[str, Any]) -> tokenizers.Tokenizer | None:
    """The backend for text behind a control token, where the space goes before the very first word alone."""
    later = {**spec, "pre_tokenizer": copy.deepcopy(spec.get("pre_tokenizer"))}
    firsts = [s for s in _steps(later["pre_tokenizer"], "pretokenizers") if s.get("prepend_scheme") == "first"]
    for step in firsts:
        step["prepend_scheme"] = "never"
    return _plain_backend(later) if firsts else None


def _strips_space(spec: Mapping[str, Any]) -> bool:
    for step in _steps(spec.get("decoder"), "decoders"):
        if step["type"] == "Strip" and step["content"] == " " and step["start"] > 0:
            return True
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return True
    return False


def _around(
    spec: Mapping[str, Any], config: Mapping[str, Any], ids: Mapping[str, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids before and behind a prompt; tokenizer_config.json's word goes before tokenizer.json's."""
    prefix, suffix = _template_ids(spec)
    for key, token in (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token")):
        if not isinstance(config.get(key), bool):
            continue
        text = _token_text(config.get(token))
        if config[key] and text not in ids:
            raise ModelFileError(f"tokenizer_config.json sets {key}, but its {token} is not in the vocabulary.")
        wanted = (ids[text],) if config[key] else ()
        prefix, suffix = (wanted, suffix) if token == "bos_token" else (prefix, wanted)
    return prefix, suffix


def _template_ids(spec: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    before: list[int] = []
    behind: list[int] = []
    for step in _steps(spec.get("post_processor"), "processors"):
        if step["type"] == "ByteLevel":
            continue
        if step["type"] != "TemplateProcessing":
            raise UnsupportedModelError(f"The post-processor {step['type']!r} is not known here.")
        side = before
        for item in step["single"]:
            if "Sequence" in item:
                side = behind
            else:
                side += step["special_tokens"][item["SpecialToken"]["id"]]["ids"]
    return tuple(before), tuple(behind)


def _eos_ids(path: Path, config: Mapping[str, Any], ids: Mapping[str, int]) -> frozenset[int]:
    named = _read_json(path / "generation_config.json").get("eos_token_id", [])
    found = set(named if isinstance(named, list) else [named])
    own = ids.get(_token_text(config.get("eos_token")))
    if own is not None:
        found.add(own)
    if not all(isinstance(i, int) and i >= 0 for i in found):
        raise ModelFileError(f"{path / 'generation_config.json'}: eos_token_id must be a token id or a list of them.")
    return frozenset(found)


def _token_text(value: Any) -> str:
    """A token of tokenizer_config.json: its text, or an object with its text."""
    return (value.get("content") if isinstance(value, dict) else value) or ""


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        return next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; an absent file is an empty one."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFileError(f"{path} is not JSON: {error}. Fetch it again.") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} is not a JSON object.")
    return value
