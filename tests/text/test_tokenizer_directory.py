"""Tokenizers out of a model directory."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from tpu_infer.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from tpu_infer.text.tokenizer import Tokenizer
from tpu_infer.text.vocabulary import BYTE_ALPHABET


def _byte_level() -> Backend:
    """Ids: 256 bytes, <s> 256, <|end|> 257 (swallows space behind it), <think> 258 (not special)."""
    backend = Backend(models.BPE(vocab=dict(BYTE_ALPHABET), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", AddedToken("<|end|>", rstrip=True, special=True)])
    backend.add_tokens(["<think>"])
    return backend


def _metaspace(scheme: str) -> Backend:
    vocab = {
        text: i for i, text in enumerate(["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"])
    }
    backend = Backend(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>"])
    return backend


def _write(path: Path, backend: Backend, **files: dict[str, Any]) -> Path:
    backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("tokenizer"), _byte_level())


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(directory)


TEXTS = st.lists(st.sampled_from(["<s>", "<|end|>", "<think>", "a", " ", "é", "한", "\n"]), max_size=12).map("".join)


@given(text=TEXTS)
def test_parsing_special_agrees_with_the_library(tokenizer: Tokenizer, text: str) -> None:
    expected = _byte_level().encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, parse_special=True) == expected


@given(text=TEXTS)
def test_plain_text_reaches_no_special_token(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert not {256, 257} & set(ids)
    assert tokenizer.decode(ids) == text
    assert ids.count(258) == text.count("<think>")


def test_a_role_token_that_the_file_does_not_call_special(tmp_path: Path) -> None:
    backend = _byte_level()
    backend.add_tokens(["<｜User｜>"])
    tokenizer = Tokenizer.from_directory(_write(tmp_path, backend))
    assert 259 not in tokenizer.encode("<｜User｜>")
    assert tokenizer.encode("<｜User｜>", parse_special=True) == [259]


def test_bos_from_the_post_processor(tmp_path: Path) -> None:
    backend = _byte_level()
    backend.post_processor = processors.TemplateProcessing(
        "<s> $A <|end|>", special_tokens=[("<s>", 256), ("<|end|>", 257)]
    )
    tokenizer = Tokenizer.from_directory(_write(tmp_path, backend))
    assert tokenizer.encode("a") == [256, ord("a"), 257]
    assert tokenizer.add_bos
    assert tokenizer.encode("a", add_special=False) == [ord("a")]


@pytest.mark.parametrize(("add", "ids"), [(True, [256, 97]), (False, [97])])
def test_the_config_decides_over_the_post_processor(tmp_path: Path, add: bool, ids: list[int]) -> None:
    backend = _byte_level()
    if not add:
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    config = {"add_bos_token": add, "bos_token": {"content": "<s>"}, "eos_token": "<|end|>"}
    tokenizer = Tokenizer.from_directory(_write(tmp_path, backend, tokenizer_config=config))
    assert tokenizer.encode("a") == ids
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (256, frozenset({257}))


def test_eos_may_be_a_list_in_generation_config(tmp_path: Path) -> None:
    files = {"tokenizer_config": {"eos_token": "<|end|>"}, "generation_config": {"eos_token_id": [256, 9]}}
    assert Tokenizer.from_directory(_write(tmp_path, _byte_level(), **files)).eos_ids == {9, 256, 257}


def test_the_template_file_goes_before_the_config(tmp_path: Path) -> None:
    _write(tmp_path, _byte_level(), tokenizer_config={"chat_template": [{"name": "default", "template": "old"}]})
    assert Tokenizer.from_directory(tmp_path).chat_template == "old"
    (tmp_path / "chat_template.jinja").write_text("new", encoding="utf-8")
    assert Tokenizer.from_directory(tmp_path).chat_template == "new"


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("text", ["a", "a<s>a", "<s>a a", "<s><s>a", " a"])
def test_the_space_before_the_first_word(tmp_path: Path, scheme: str, text: str) -> None:
    backend = _metaspace(scheme)
    tokenizer = Tokenizer.from_directory(_write(tmp_path, backend))
    ids = tokenizer.encode(text, parse_special=True)
    assert ids == backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special=False) == backend.decode(ids, skip_special_tokens=False)


def test_a_normaliser_that_prepends_does_so_behind_each_control_token(tmp_path: Path) -> None:
    backend = _metaspace("never")
    backend.pre_tokenizer = None  # type: ignore[assignment]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = Tokenizer.from_directory(_write(tmp_path, backend))
    assert tokenizer.encode("a<s>a", parse_special=True) == backend.encode("a<s>a", add_special_tokens=False).ids


def test_truncation_in_the_file_is_not_obeyed(tmp_path: Path) -> None:
    backend = _byte_level()
    backend.enable_truncation(2)
    assert len(Tokenizer.from_directory(_write(tmp_path, backend)).encode("abcdef")) == 6


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text('{"model": {"vocab"', encoding="utf-8")
    with pytest.raises(ModelFileError, match="not JSON"):
        Tokenizer.from_directory(tmp_path)
    file.write_text("{}", encoding="utf-8")
    with pytest.raises(ModelFileError, match="no model"):
        Tokenizer.from_directory(tmp_path)
    file.write_text('{"model": {"type": "WordPiece", "vocab": {}}}', encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        Tokenizer.from_directory(tmp_path)
    file.write_text('{"model": {"type": "BPE", "vocab": {}}, "decoder": {"type": "CTC"}}', encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match="CTC"):
        Tokenizer.from_directory(tmp_path)
