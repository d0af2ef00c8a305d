"""One TOML file, then flags; and every fault is named by its key."""

from pathlib import Path
from typing import Any

import pytest

from tpu_infer.config import Config, load_config, options
from tpu_infer.errors import ConfigError


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "serve.toml"
        path.write_text(text)
        return path

    return write


def test_nothing_given_is_the_defaults():
    assert load_config() == load_config(flags={}) == Config()


def test_the_file_wins_over_defaults_and_flags_over_the_file(toml: Any):
    file = toml('[model]\nmodel = "a"\ndtype = "float32"\n[cache]\npage_size = 16\n[scheduler]\nmax_num_seqs = 4\n')
    config = load_config(file, {"page_size": 64, "tensor": 2, "forbid_compiles": True})
    assert (config.model.model, config.model.dtype, config.model.layers) == ("a", "float32", "auto")
    assert (config.cache.page_size, config.scheduler.max_num_seqs) == (64, 4)
    assert (config.mesh.tensor, config.compile.forbid_compiles) == (2, True)
    assert load_config(file).cache.page_size == 16


def test_names_are_unique_since_flags_go_without_their_part():
    names = [option.name for _, option in options()]
    assert len(set(names)) == len(names)


def test_every_default_is_valid_and_has_help():
    for part, option in options():
        assert option.metadata["help"]
        assert load_config(flags={option.name: option.default}) == Config(), part


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("[cache]\npage_sise = 1", "cache.page_sise", "cache has page_size"),
        ("[caches]\npage_size = 1", "caches", "there are cache, compile"),
        ("cache = 3", "cache", "is not a table"),
        ("page_size = 3", "page_size", "is not a table"),
        ("[cache]\npage_size = 0", "cache.page_size", "from 1 to 4096, got 0"),
        ("[cache]\npage_size = 4097", "cache.page_size", "from 1 to 4096, got 4097"),
        ("[cache]\ncache_pages = -1", "cache.cache_pages", "got -1"),
        ("[cache]\npage_size = true", "cache.page_size", "type int, got True"),
        ("[cache]\npage_size = 8.0", "cache.page_size", "type int, got 8.0"),
        ('[cache]\npage_size = "8"', "cache.page_size", "type int, got '8'"),
        ("[compile]\nlogprobs = 1", "compile.logprobs", "type bool, got 1"),
        ("[model]\nmodel = 7", "model.model", "type str, got 7"),
        ('[model]\ndtype = "float16"', "model.dtype", "one of auto, float32, bfloat16, got 'float16'"),
    ],
)
def test_faults_in_the_file(toml: Any, text: str, key: str, message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(toml(text))
    assert caught.value.key == key
    assert str(caught.value).startswith(f"{key}: ")


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ({"page_sise": 1}, "page_sise"),
        ({"cache.page_size": 1}, "cache.page_size"),
        ({"page_size": True}, "cache.page_size"),
        ({"page_size": None}, "cache.page_size"),
        ({"logprobs": 0}, "compile.logprobs"),
        ({"tensor": 0}, "mesh.tensor"),
        ({"layers": "both"}, "model.layers"),
    ],
)
def test_faults_in_flags(flags: dict[str, Any], key: str):
    with pytest.raises(ConfigError) as caught:
        load_config(flags=flags)
    assert caught.value.key == key


def test_a_file_that_is_not_there_or_no_toml(toml: Any, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read: No such file"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"serve\.toml: is not TOML"):
        load_config(toml("[cache"))
    bad = tmp_path / "bad.toml"
    bad.write_bytes(b'[model]\nmodel = "\xff"')
    with pytest.raises(ConfigError, match=r"bad\.toml: is not TOML"):
        load_config(bad)
