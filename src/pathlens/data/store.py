"""Where the published image sets lie on this machine: finding, checking, importing and caching them.

The command line's `pathlens data` stands on `status`, `check` and `import_from`; `images.py` on `load_split`. Nothing
here ever uses the network, and a file that fails its check is reported and left as it is. A file whose checksum is
known is compared with it before anything decodes it. May import `pathlens.errors`, `pathlens.files` and this folder's
`checksums` and `formats`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tarfile
import tempfile
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from pathlens.data import checksums, formats
from pathlens.data.checksums import Digest, Form, SetFacts
from pathlens.data.formats import Bytes
from pathlens.errors import (
    DataCorruptError,
    DataMissingError,
    FileFormatError,
    PathlensWarning,
    StoreError,
    unknown_name,
)
from pathlens.files import parse_json, read_npy

Split = Literal["train", "test"]
State = Literal["ok", "absent", "corrupt", "unverified"]
T = TypeVar("T")
BOTH: tuple[Split, Split] = ("train", "test")


# --- what callers get -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """One complete copy of a set that was found: its form and the folder, or the archive, that holds it."""

    facts: SetFacts
    form: Form
    folder: Path
    archive: Path | None = None

    @property
    def place(self) -> Path:
        """The archive, or the folder of the files."""
        return self.archive or self.folder

    def describe(self) -> str:
        """The form in words: ``idx.gz``, ``packed``, ``python (archive)``…"""
        return f"{self.form.name} (archive)" if self.archive else self.form.name


@dataclass(frozen=True)
class Loaded:
    """The decoded arrays of one split, the form they came in, and whether a checksum vouches for them.

    The form and not the folder: it ends up in artifacts, and those must not name folders of the machine they ran on.
    """

    arrays: dict[str, Bytes]
    source: str
    verified: bool


@dataclass(frozen=True)
class SetStatus:
    """How one set stands on this machine.

    ``state`` is ``ok``, ``absent``, ``corrupt`` or ``unverified`` (complete, but no checksum is known for this form, or
    only `check` can tell); ``detail`` says more in one line.
    """

    name: str
    title: str
    state: State
    form: str | None = None
    place: Path | None = None
    detail: str = ""


@dataclass(frozen=True)
class Imported:
    """One set that was copied into the user's data folder."""

    name: str
    form: str
    folder: Path
    files: tuple[str, ...]
    bytes: int
    verified: bool


# --- folders ----------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """The package's folder in the user's cache: ``$XDG_CACHE_HOME/pathlens``, else ``~/.cache/pathlens``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pathlens"


def data_folders() -> list[Path]:
    """The folders searched for data, in order: ``$PATHLENS_DATA`` if set, then ``data`` in the user's cache.

    Examples
    --------
    >>> data_folders()[-1].name
    'data'
    """
    given = os.environ.get("PATHLENS_DATA")
    return [*([Path(given).expanduser()] if given else []), cache_folder() / "data"]


def set_names() -> tuple[str, ...]:
    """The published sets that can be checked and imported.

    Examples
    --------
    >>> set_names()
    ('mnist', 'fashion_mnist', 'cifar10', 'cifar100')
    """
    return tuple(checksums.SETS)


def facts_of(name: str) -> SetFacts:
    """The facts of a published set by name; hyphens count as underscores."""
    try:
        return checksums.SETS[name.replace("-", "_")]
    except KeyError:
        raise unknown_name("data set", name, checksums.SETS) from None


# --- the functions of the command line --------------------------------------------------------------------------


def status(names: Sequence[str] | None = None) -> list[SetStatus]:
    """How each published set stands, from file checksums alone; `check` also decodes.

    About half a second for each 150 MB on disk. Never raises for absent or broken files.

    Examples
    --------
    >>> [(found.name, found.state) for found in status()]  # doctest: +SKIP
    [('mnist', 'ok'), ('fashion_mnist', 'ok'), ('cifar10', 'ok'), ('cifar100', 'absent')]
    """
    return [_status(facts_of(name)) for name in names or set_names()]


def check(name: str) -> SetStatus:
    """Decodes a set completely, past the cache, and compares every array with its checksum; seconds for CIFAR."""
    facts = facts_of(name)
    source = find(facts)
    if source is None:
        return _status(facts)
    try:
        parts = [_read(source, split) for split in BOTH]
    except DataCorruptError as error:
        return SetStatus(facts.name, facts.title, "corrupt", source.describe(), source.place, str(error))
    if all(part.verified for part in parts):
        return SetStatus(facts.name, facts.title, "ok", source.describe(), source.place, "every checksum agrees")
    return SetStatus(facts.name, facts.title, "unverified", source.describe(), source.place, _UNVERIFIED)


def import_from(path: str | os.PathLike[str], names: Sequence[str] | None = None) -> list[Imported]:
    """Copies published sets from a folder or an archive into the user's data folder, after checking them.

    Recognises the official files (idx, gzipped or not; CIFAR archives and unpacked batches) and the packed form, in
    the folder itself or in the usual folders under it. MNIST and Fashion-MNIST have the same file names and are told
    apart by checksum. Everything is checked before the first byte is copied; each file is written under a temporary
    name, compared, and renamed.

    Parameters
    ----------
    path : path
        A folder, or one ``cifar-*.tar.gz``.
    names : sequence of str, optional
        Only these sets; all that are recognised if None.

    Returns
    -------
    list of Imported

    Raises
    ------
    DataMissingError
        Nothing is recognised, or a set named in `names` is not there.
    DataCorruptError
        A recognised file fails its check; nothing is copied.
    StoreError
        The user's data folder cannot be written.
    """
    origin = Path(path).expanduser()
    if not origin.exists():
        raise DataMissingError(f"data import: {origin} does not exist. Pass a folder or a cifar-*.tar.gz archive.")
    wanted = [facts_of(name) for name in names] if names else list(checksums.SETS.values())
    sources = [source for facts in wanted if (source := _find_for_import(facts, origin)) is not None]
    absent = [facts for facts in wanted if all(facts.name != source.facts.name for source in sources)]
    if not sources or (names and absent):
        strays = [
            facts.title for facts in absent if any(_complete(Source(facts, form, origin), BOTH) for form in facts.forms)
        ]
        if strays and not sources:
            raise DataCorruptError(
                f"data import: {origin} has files with the names of {' or '.join(strays)}, but none "
                "has a published checksum. Get the files again."
            )
        lines = [f"data import: {', '.join(facts.title for facts in absent)} not found in {origin}."]
        lines += [f"  {facts.title} needs {_wanted(facts)}" for facts in absent]
        raise DataMissingError("\n".join(lines))
    verified = {}
    for source in sources:
        verified[source.facts.name] = all(_read(source, split).verified for split in BOTH)
    try:
        return [_copy(source, verified[source.facts.name]) for source in sources]
    except OSError as error:
        raise StoreError(
            f"data import: {cache_folder() / 'data'} cannot be written: {error.strerror or error}. Set "
            "XDG_CACHE_HOME to another folder."
        ) from error


# --- loading ----------------------------------------------------------------------------------------------------


def load_split(name: str, split: Split) -> Loaded:
    """The uint8 arrays of one split: ``images`` (n, h, w[, 3]), ``labels`` (n,), for CIFAR-100 also ``coarse`` (n,).

    CIFAR takes seconds to decode, so its arrays are kept as ``.npy`` in the user's cache; they are checked on every
    load, and rebuilt if they fail.

    Raises
    ------
    DataMissingError
        With the folders searched, the files wanted, and the command that imports them.
    DataCorruptError
        With the file, the expected and the found checksum.
    """
    facts = facts_of(name)
    if facts.slow and (cached := _read_cache(facts, split)) is not None:
        return cached
    source = find(facts, (split,))
    if source is None:
        raise _missing(facts, (split,))
    loaded = _read(source, split)
    if facts.slow and loaded.verified:
        _write_cache(facts, split, loaded)
    return loaded


def find(facts: SetFacts, splits: Sequence[Split] = BOTH) -> Source | None:
    """The first complete copy of a set (of these splits) in the folders searched."""
    for root in data_folders():
        for form in facts.forms:
            for source in _candidates(facts, form, root):
                if _complete(source, splits):
                    return source
    return None


def _candidates(facts: SetFacts, form: Form, root: Path) -> Iterator[Source]:
    for folder in form.folders:
        yield Source(facts, form, root / folder)
    if form.archive:
        for folder in form.archive_folders:
            yield Source(facts, form, root / folder, root / folder / form.archive)


def _complete(source: Source, splits: Sequence[str]) -> bool:
    if source.archive is not None:
        return source.archive.is_file()
    return all((source.folder / name).is_file() for name in source.form.files(tuple(splits)))


def _wanted(facts: SetFacts) -> str:
    """The files of each form in words, one form per clause."""
    choices = []
    for form in facts.forms:
        files = form.files()
        named = ", ".join(files) if len(files) <= 6 else f"{files[0]} … {files[-1]} ({len(files)} files)"
        choices.append(f"{form.folders[0]}/{{{named}}}")
        if form.archive:
            choices.append(form.archive)
    return "; or ".join(choices)


def _missing(facts: SetFacts, splits: Sequence[str]) -> DataMissingError:
    lines = [f"{facts.title} is not on this machine. Searched:"]
    for root in data_folders():
        lines.append(f"  {root}")
        for form in facts.forms:  # a copy that lacks a file or two is worth naming: it is what the user has to fix
            for folder in form.folders:
                names = form.files(tuple(splits))
                absent = [name for name in names if not (root / folder / name).is_file()]
                if len(absent) < len(names):
                    lines.append(
                        f"    {folder} has {len(names) - len(absent)} of {len(names)} files; "
                        f"missing: {', '.join(absent)}"
                    )
    lines.append(f"Files wanted, in one of those folders: {_wanted(facts)}.")
    lines.append("If you have them elsewhere, run: pathlens data import FOLDER_OR_ARCHIVE (or set PATHLENS_DATA).")
    return DataMissingError("\n".join(lines))


# --- reading and checking ---------------------------------------------------------------------------------------

_REPACKED = " (if it was only packed again, unpack it and import the files: they are checked by what they hold)"
_UNVERIFIED = "complete, labels in range and balanced, but no published checksum is known for this form"


@dataclass(frozen=True)
class _Mismatch:
    path: Path
    expected: Digest
    found: str

    def __str__(self) -> str:
        return f"{self.path}: {self.expected.algorithm} is {self.found}, expected {self.expected.value}"


def _read(source: Source, split: Split) -> Loaded:
    """Checks the files of one split, decodes them, and checks the result: shapes, labels, array checksums."""
    facts = source.facts
    files = _read_files(source, split)
    try:
        arrays = _decode(source, split, files)
        _check_shapes(facts, split, arrays, source)
    except FileFormatError as error:
        raise _corrupt(facts, [], str(error)) from error
    for name, array in arrays.items():
        expected = facts.arrays.get(f"{split}_{name}")
        if expected is not None and (found := _sha256(array)) != expected:
            raise _corrupt(
                facts, [], f"{source.place}: the decoded {split} {name} have sha256 {found}, expected {expected}"
            )
    verified = bool(facts.arrays) or source.archive is not None or all(name in source.form.digests for name in files)
    return Loaded(arrays, source.describe(), verified)


def _mismatch(path: Path, found: str, expected: Digest) -> list[_Mismatch]:
    return [] if found == expected.value else [_Mismatch(path, expected, found)]


def _corrupt(facts: SetFacts, mismatches: Sequence[_Mismatch], reason: str) -> DataCorruptError:
    facts_found = [reason.rstrip("."), *map(str, mismatches)]
    return DataCorruptError(
        f"{facts.title} is corrupt. "
        + "; ".join(part for part in facts_found if part)
        + ". Nothing was changed. Get the file again, then run: pathlens data import FOLDER_OR_ARCHIVE"
        + (_REPACKED if any(mismatch.path.suffix == ".gz" for mismatch in mismatches) else "")
    )


def _digest_file(path: Path, digest: Digest) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(digest.algorithm, usedforsecurity=False)).hexdigest()


def _sha256(array: Bytes) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def _largest(facts: SetFacts, split: Split) -> int:
    """More bytes than the files of a split have in any form: a pickle as text has one and a half times those of its
    images, and no image comes with as many as 64 bytes of its own."""
    return 2 * facts.rows[split] * (math.prod(facts.image) + 64) + 8192


def _read_files(source: Source, split: Split) -> dict[str, bytes]:
    """The bytes of a split's files, which have their checksums wherever those are known.

    Raises
    ------
    DataCorruptError
        A checksum does not agree, or a file is larger than any of this set; nothing is decoded then.
    """
    facts, form, names = source.facts, source.form, source.form.splits[split]
    most = _largest(facts, split)
    if source.archive is not None:
        assert form.archive_digest is not None  # every published archive has a checksum
        found = _digest_file(source.archive, form.archive_digest)
        if mismatches := _mismatch(source.archive, found, form.archive_digest):
            raise _corrupt(facts, mismatches, "")
        wanted = {f"{form.member_folder}/{name}": name for name in names}
        members: dict[str, bytes] = {}
        with tarfile.open(source.archive, "r:gz") as archive:
            for member in archive:  # members are read by exact name into memory; nothing is unpacked to disk
                name = wanted.get(member.name.removeprefix("./"))
                if name is not None and (stream := archive.extractfile(member)) is not None:
                    members[name] = stream.read()
                if len(members) == len(wanted):
                    break
        return {name: members[name] for name in names}
    files: dict[str, bytes] = {}
    mismatches, left = [], most
    for name in names:
        path = source.folder / name
        left -= (size := path.stat().st_size)
        if left < 0:
            raise _corrupt(
                facts, mismatches, f"{path}: {size} bytes, expected at most {most} in all of {', '.join(names)}"
            )
        data = path.read_bytes()
        if digest := form.digests.get(name):
            found = hashlib.new(digest.algorithm, data, usedforsecurity=False).hexdigest()
            mismatches += _mismatch(path, found, digest)
        files[name] = data
    if mismatches:
        raise _corrupt(facts, mismatches, "")
    return files


def _decode(source: Source, split: Split, files: dict[str, bytes]) -> dict[str, Bytes]:
    facts, form = source.facts, source.form

    def where(name: str) -> str:
        return str(source.place / name)

    if form.name in ("idx.gz", "idx"):
        most = 16 + facts.rows[split] * math.prod(facts.image)
        images, labels = (formats.read_idx(data, where(name), most) for name, data in files.items())
        return {"images": images, "labels": labels}
    if form.name == "packed":
        labels = formats.read_labels_npz(files.pop("labels.npz"), where("labels.npz"), f"{split}_labels")
        parts = [
            formats.read_webp_strips(data, where(name))
            for name, data in tracked(files.items(), f"decoding {facts.title}, {split}")
        ]
        return {"images": np.concatenate(parts), "labels": labels}
    coarse = facts.coarse_classes > 0
    batches = []
    for name, data in files.items():
        if form.name == "python":
            keys = ("coarse_labels", "fine_labels") if coarse else ("labels",)
            batches.append(formats.read_cifar_python(data, where(name), keys))
        else:
            batches.append(formats.read_cifar_binary(data, where(name), 2 if coarse else 1))
    labels = np.concatenate([batch[0] for batch in batches])
    arrays = {"images": np.concatenate([batch[1] for batch in batches]), "labels": labels[:, -1].copy()}
    return {**arrays, "coarse": labels[:, 0].copy()} if coarse else arrays


def _check_shapes(facts: SetFacts, split: Split, arrays: dict[str, Bytes], source: Source) -> None:
    n = facts.rows[split]
    shapes = {"images": (n, *facts.image), "labels": (n,), "coarse": (n,)}
    for name, array in arrays.items():
        if array.shape != shapes[name]:
            raise FileFormatError(f"{source.place}: {split} {name} have shape {array.shape}, expected {shapes[name]}")
    for name, classes in (("labels", facts.classes), ("coarse", facts.coarse_classes)):
        if name not in arrays:
            continue
        top = int(arrays[name].max())
        if top >= classes:
            raise FileFormatError(f"{source.place}: {split} {name} go up to {top}, expected at most {classes - 1}")
        counts = np.bincount(arrays[name], minlength=classes)
        # CIFAR-100 is published with equally many images per class: the one check left where no checksum is known
        if not facts.arrays and not np.all(counts == n // classes):
            raise FileFormatError(
                f"{source.place}: {split} {name} occur {counts.min()} to {counts.max()} times, "
                f"expected {n // classes} each"
            )


def tracked(items: Collection[T], text: str) -> Iterator[T]:
    """The items, with a progress bar while they last.

    Examples
    --------
    >>> list(tracked([1, 2], "counting"))
    [1, 2]
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:  # silent in a pipe
        task = bar.add_task(text, total=len(items))
        for item in items:
            yield item
            bar.advance(task)


def _status(facts: SetFacts) -> SetStatus:
    source = find(facts)
    if source is None:
        if facts.slow and all(_read_cache(facts, split) is not None for split in BOTH):
            return SetStatus(facts.name, facts.title, "ok", "decoded", _decoded_folder(), "only the decoded cache")
        return SetStatus(facts.name, facts.title, "absent", detail=f"wanted: {_wanted(facts)}")
    form, known, bad = source.form, True, []
    if source.archive is not None and form.archive_digest is not None:
        bad = _mismatch(source.archive, _digest_file(source.archive, form.archive_digest), form.archive_digest)
    else:
        for name in form.files():
            digest = form.digests.get(name)
            if digest is None:
                known = False
                continue
            bad += _mismatch(source.folder / name, _digest_file(source.folder / name, digest), digest)
    found = source.describe(), source.place
    if not bad and known:
        return SetStatus(facts.name, facts.title, "ok", *found, "every file has its published checksum")
    if bad:
        return SetStatus(facts.name, facts.title, "corrupt", *found, str(_corrupt(facts, bad, "")))
    return SetStatus(
        facts.name,
        facts.title,
        "unverified",
        *found,
        f"no file checksum is known for this form; `pathlens data check {facts.name}` decodes it",
    )


# --- importing --------------------------------------------------------------------------------------------------


def _find_for_import(facts: SetFacts, origin: Path) -> Source | None:
    """A copy of the set at `origin`; a broken one that can only be this set counts, so that its check can say so."""
    for form in facts.forms:
        if origin.is_file():
            # browsers rename downloads ("cifar-10-python (1).tar.gz"): the checksum also tells
            digest = form.archive_digest
            if digest and (origin.name == form.archive or _digest_file(origin, digest) == digest.value):
                return Source(facts, form, origin.parent, origin)
            continue
        for source in _candidates(facts, form, origin):
            if _complete(source, BOTH):
                return source
        here = Source(facts, form, origin)
        if _complete(here, BOTH) and _belongs(here):
            return here
    return None


def _belongs(source: Source) -> bool:
    """Whether files that lie in the given folder itself are this set's: MNIST and Fashion-MNIST share their names."""
    if source.form.name not in ("idx.gz", "idx"):
        return True
    names = source.form.files()
    if any(
        _digest_file(source.folder / name, digest) == digest.value
        for name, digest in source.form.digests.items()
        if name in names
    ):
        return True
    if source.form.digests:
        return False
    path = source.folder / source.form.splits["test"][1]
    if path.stat().st_size > _largest(source.facts, "test"):
        return False
    try:  # unpacked: no file has a checksum, and the labels decide
        labels = formats.read_idx(path.read_bytes(), str(path), 8 + source.facts.rows["test"])
    except FileFormatError:
        return False
    return _sha256(labels) == source.facts.arrays.get("test_labels")


def _copy(source: Source, verified: bool) -> Imported:
    form, root = source.form, cache_folder() / "data"
    if source.archive is not None:
        folder = root / form.archive_folders[0]
        pairs = [(source.archive, folder / str(form.archive))]
    else:
        folder = root / form.folders[0]
        pairs = [(source.folder / name, folder / name) for name in form.files()]
    folder.mkdir(parents=True, exist_ok=True)
    total = 0
    for origin, target in tracked(pairs, f"importing {source.facts.title}"):
        total += origin.stat().st_size
        if not (target.exists() and target.samefile(origin)):
            _copy_file(origin, target)
    return Imported(
        source.facts.name, source.describe(), folder, tuple(target.name for _, target in pairs), total, verified
    )


def _copy_file(origin: Path, target: Path) -> None:
    sha = Digest("sha256", "")
    with _replacing(target) as temporary:
        shutil.copyfile(origin, temporary)
        if _digest_file(temporary, sha) != _digest_file(origin, sha):
            raise DataCorruptError(
                f"{origin}: the copy in {target.parent} differs from it, and was dropped. Check the disk."
            )


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A temporary name beside `target` that becomes it on success, and is gone on failure."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # mkstemp's 0600 would lock out a shared cache
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


# --- the cache of decoded arrays --------------------------------------------------------------------------------


def _decoded_folder() -> Path:
    return cache_folder() / "decoded"


def _cache_paths(facts: SetFacts, split: str) -> dict[str, Path]:
    return {name: _decoded_folder() / f"{facts.name}-{split}-{name}.npy" for name in facts.array_names()}


def _read_cache(facts: SetFacts, split: Split) -> Loaded | None:
    """The cached arrays if every one has its checksum, else None: a damaged cache counts as none."""
    paths = _cache_paths(facts, split)
    try:
        if facts.arrays:
            expected = {name: facts.arrays[f"{split}_{name}"] for name in paths}
        else:  # no published array checksum: the one noted when a checked archive was decoded
            expected = parse_json((_decoded_folder() / f"{facts.name}-{split}.json").read_bytes())
        arrays = {}
        for name, path in paths.items():
            with path.open("rb") as stream:
                array = read_npy(stream, path.stat().st_size)
            shape = (facts.rows[split], *(facts.image if name == "images" else ()))
            if array.dtype != np.uint8 or array.shape != shape or _sha256(array) != expected[name]:
                return None
            arrays[name] = array
    except (OSError, ValueError, EOFError, KeyError, TypeError):
        return None
    return Loaded(arrays, "decoded cache", True)


def _write_cache(facts: SetFacts, split: Split, loaded: Loaded) -> None:
    try:
        _decoded_folder().mkdir(parents=True, exist_ok=True)
        for name, path in _cache_paths(facts, split).items():
            with _replacing(path) as temporary, temporary.open("wb") as file:
                np.save(file, loaded.arrays[name], allow_pickle=False)
        if not facts.arrays:
            with _replacing(_decoded_folder() / f"{facts.name}-{split}.json") as temporary:
                noted = {name: _sha256(array) for name, array in loaded.arrays.items()}
                temporary.write_text(json.dumps(noted), encoding="utf-8")
    except OSError as error:
        warnings.warn(
            f"{facts.title}: the decoded arrays could not be kept in {_decoded_folder()} ({error}); the next "
            "load decodes again. Set XDG_CACHE_HOME to a folder with space.",
            PathlensWarning,
            stacklevel=4,
        )
