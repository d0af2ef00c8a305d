"""The command line as a user meets it: real processes, exit codes, one-line errors, Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny_directory import write_tiny_directory
from tpu_infer.config import options

TIMEOUT = 180
FAST = ("--layers", "scan", "--max-num-batched-tokens", "32")


def run(*arguments: str, cache: Path | None = None, text: str = "") -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({"TPU_INFER_CACHE": str(cache)} if cache else {})
    command = [sys.executable, "-m", "tpu_infer.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, input=text, env=environment, timeout=TIMEOUT)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_directory(tmp_path_factory.mktemp("tiny")))


def test_help_shows_every_option_with_its_default() -> None:
    result = run("generate", "--help")
    words = " ".join(result.stdout.replace("│", " ").split())
    for _, option in options():
        if option.name not in ("model", "max_num_seqs", "logprobs"):
            assert "--" + option.name.replace("_", "-") in words
    assert "[default: 512]" in words
    assert "[default: auto]" in words


def test_generate_streams_the_answer_and_prints_phases(directory: str) -> None:
    result = run("generate", "abc", "--model", directory, "--max-tokens", "4", *FAST)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("\n")
    for phase in ("weights", "programs", "first token"):
        assert phase in result.stderr


def test_flags_win_over_the_file(directory: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('[scheduler]\nmax_model_len = 1000\nmax_num_batched_tokens = 32\n[model]\nlayers = "scan"\n')
    refused = run("generate", "abc", "--model", directory, "--config", str(file))
    assert refused.returncode == 1
    assert "scheduler.max_model_len" in refused.stderr
    allowed = run(
        "generate", "a", "--model", directory, "--config", str(file), "--max-model-len", "16", "--max-tokens", "1"
    )
    assert allowed.returncode == 0, allowed.stderr


def test_serve_answers_lines_until_the_input_ends(directory: str) -> None:
    result = run("serve", "--model", directory, *FAST, text="\n/clear\n")
    assert result.returncode == 0, result.stderr
    assert "pages of 32 tokens" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--model", "no-such-model"), "no-such-model"),
        (("--temperature", "nan"), "temperature"),
        (("--max-tokens", "0"), "max_tokens"),
        (("--config", "nothing"), "laptop"),
        (("--tensor", "0"), "mesh.tensor"),
    ],
)
def test_a_users_error_is_one_line_and_exit_code_1(directory: str, arguments: tuple[str, ...], text: str) -> None:
    result = run("generate", "abc", *(() if "--model" in arguments else ("--model", directory)), *FAST, *arguments)
    assert result.returncode == 1
    assert text in result.stderr
    assert "Traceback" not in result.stderr


def test_a_foreign_and_a_truncated_file_are_named(tmp_path: Path, smollm2_gguf: Path) -> None:
    foreign, truncated = tmp_path / "foreign.gguf", tmp_path / "truncated.gguf"
    foreign.write_bytes(b"PK\x03\x04 not a model")
    with smollm2_gguf.open("rb") as whole:
        truncated.write_bytes(whole.read(3_000_000))
    for file in (foreign, truncated):
        result = run("generate", "abc", "--model", str(file))
        assert result.returncode == 1
        assert file.name in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize("seconds", [1.0, 4.0, 7.0])
def test_interrupted_in_any_phase(directory: str, tmp_path: Path, seconds: float) -> None:
    """Whatever phase it hits, Ctrl-C ends the process soon, and the next start works from the same cache."""
    command = [sys.executable, "-m", "tpu_infer.cli", "generate", "abc", "--model", directory, "--max-tokens", "60"]
    process = subprocess.Popen(
        command, env=os.environ | {"TPU_INFER_CACHE": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (0, 130, -signal.SIGINT), errors
    assert process.returncode != 130 or b"Traceback" not in errors
    assert run("generate", "abc", "--model", directory, "--max-tokens", "1", *FAST, cache=tmp_path).returncode == 0


def test_interrupted_at_the_prompt(directory: str) -> None:
    """Ctrl-C ends a chat that waits for a line, though its input stays open."""
    command = [sys.executable, "-m", "tpu_infer.cli", "serve", "--model", directory, *FAST]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True) as process:  # type: ignore[call-overload]
        assert process.stderr is not None
        while "Ctrl-D ends" not in process.stderr.readline():
            assert process.poll() is None
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
