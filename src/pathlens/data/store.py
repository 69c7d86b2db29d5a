"""The published image sets on this machine: finding, checking, importing and caching them.

Nothing is downloaded. A file is compared with its checksum, where one is known, before it is decoded; a file that fails
is reported and left unchanged.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tarfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from pathlens.data import checksums, formats
from pathlens.data.checksums import Form, SetFacts
from pathlens.data.formats import Bytes
from pathlens.errors import (
    DataCorruptError,
    DataMissingError,
    FileFormatError,
    PathlensWarning,
    StoreError,
    unknown_name,
)
from pathlens.files import file_checksum, parse_json, read_npy, replacing, write_atomically
from pathlens.progress import track

Split = Literal["train", "test"]
State = Literal["ok", "absent", "corrupt", "unverified"]
BOTH: tuple[Split, Split] = ("train", "test")


# --- results ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A complete copy of a set: its form, and the folder or the archive that holds it."""

    facts: SetFacts
    form: Form
    place: Path
    archived: bool = False

    def describe(self) -> str:
        """The form in words: ``idx.gz``, ``packed``, ``python (archive)``…"""
        return f"{self.form.name} (archive)" if self.archived else self.form.name

    def complete(self, splits: Sequence[str] = BOTH) -> bool:
        """Whether the files of these splits, or the archive, exist."""
        if self.archived:
            return self.place.is_file()
        return all((self.place / name).is_file() for name in self.form.files(tuple(splits)))

    def status(self, state: State, detail: str) -> SetStatus:
        """The status of the set, found here."""
        return SetStatus(self.facts.name, self.facts.title, state, self.describe(), self.place, detail)


@dataclass(frozen=True)
class Loaded:
    """The decoded arrays of one split, the form they were read from, and whether a checksum confirms them.

    The form and not the folder: it is written to artifacts, which must not name folders of this machine.
    """

    arrays: dict[str, Bytes]
    source: str
    verified: bool


@dataclass(frozen=True)
class SetStatus:
    """Whether one set is on this machine and intact.

    ``state`` is ``ok``, ``absent``, ``corrupt`` or ``unverified`` (complete, but no checksum is known for this form, or
    only `check` can compare it); ``detail`` explains it in one line.
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


# --- functions of the command line ------------------------------------------------------------------------------


def status(names: Sequence[str] | None = None) -> list[SetStatus]:
    """The status of each published set, from checksums of files alone; `check` also decodes.

    About half a second for each 150 MB on disk. Never raises for absent or broken files.

    Examples
    --------
    >>> [(found.name, found.state) for found in status()]  # doctest: +SKIP
    [('mnist', 'ok'), ('fashion_mnist', 'ok'), ('cifar10', 'ok'), ('cifar100', 'absent')]
    """
    return [_status(facts_of(name)) for name in names or set_names()]


def check(name: str) -> SetStatus:
    """Decode a set completely, without the cache, and compare every array with its checksum; seconds for CIFAR."""
    facts = facts_of(name)
    source = find(facts)
    if source is None:
        return _status(facts)
    try:
        verified = all(_read(source, split).verified for split in BOTH)
    except DataCorruptError as error:
        return source.status("corrupt", str(error))
    if verified:
        return source.status("ok", "every checksum agrees")
    return source.status(
        "unverified", "complete, labels in range and balanced, but no published checksum is known for this form"
    )


def import_from(path: str | os.PathLike[str], names: Sequence[str] | None = None) -> list[Imported]:
    """Copy published sets from a folder or an archive into the user's data folder, after checking them.

    Recognises the official files (idx, gzipped or not; CIFAR archives and unpacked batches) and the packed form, in
    the folder itself or in the usual folders under it. MNIST and Fashion-MNIST have the same file names and are
    distinguished by checksum. Everything is checked before the first byte is copied; each file is written under a
    temporary name, compared, and renamed.

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
        named = [facts.title for facts in absent if any(Source(facts, form, origin).complete() for form in facts.forms)]
        if named and not sources:
            raise DataCorruptError(
                f"data import: {origin} has files with the names of {' or '.join(named)}, but none "
                "has a published checksum. Get the files again."
            )
        lines = [f"data import: {', '.join(facts.title for facts in absent)} not found in {origin}."]
        lines += [f"  {facts.title} needs {_wanted(facts)}" for facts in absent]
        raise DataMissingError("\n".join(lines))
    verified = [all(_read(source, split).verified for split in BOTH) for source in sources]
    try:
        return [_copy(*pair) for pair in zip(sources, verified)]
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
    candidates = (source for root in data_folders() for form in facts.forms for source in _places(facts, form, root))
    return next((source for source in candidates if source.complete(splits)), None)


def _places(facts: SetFacts, form: Form, root: Path) -> Iterator[Source]:
    """Where a form may be under a data folder: its folders, then its archive beside each of them."""
    for folder in form.folders:
        yield Source(facts, form, root / folder)
    if form.archive:
        for folder in form.folders:
            yield Source(facts, form, (root / folder).parent / form.archive, archived=True)


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
        for form in facts.forms:  # incomplete copies
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


def _read(source: Source, split: Split) -> Loaded:
    """Check the files of one split, decode them, and check the result: shapes, labels, array checksums."""
    facts = source.facts
    files = _read_files(source, split)
    try:
        arrays = _decode(source, split, files)
        _check_shapes(facts, split, arrays, source)
    except FileFormatError as error:
        raise _corrupt(facts, str(error).rstrip(".")) from error
    for name, array in arrays.items():
        expected = facts.arrays.get(f"{split}_{name}")
        if expected is not None and (found := _sha256(array)) != expected:
            raise _corrupt(
                facts, f"{source.place}: the decoded {split} {name} have sha256 {found}, expected {expected}"
            )
    verified = bool(facts.arrays) or source.archived or all(name in source.form.digests for name in files)
    return Loaded(arrays, source.describe(), verified)


def _mismatch(path: Path, expected: str, data: bytes | None = None) -> list[str]:
    """A message if a file, or the data read from it, has another checksum; else nothing."""
    algorithm = "md5" if len(expected) == 32 else "sha256"
    if data is None:
        found = file_checksum(path, algorithm)
    else:
        found = hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()
    if found == expected:
        return []
    repacked = " (if it was only packed again, unpack it and import the files)" if path.suffix == ".gz" else ""
    return [f"{path}: {algorithm} is {found}, expected {expected}{repacked}"]


def _corrupt(facts: SetFacts, *reasons: str) -> DataCorruptError:
    return DataCorruptError(
        f"{facts.title} is corrupt. {'; '.join(reasons)}. Nothing was changed. Get the file again, then run: "
        "pathlens data import FOLDER_OR_ARCHIVE"
    )


def _sha256(array: Bytes) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def _largest(facts: SetFacts, split: Split) -> int:
    """More bytes than the files of a split have in any form: a pickle as text has one and a half times those of its
    images, and an image has less than 64 bytes of its own."""
    return 2 * facts.rows[split] * (math.prod(facts.image) + 64) + 8192


def _read_files(source: Source, split: Split) -> dict[str, bytes]:
    """The bytes of a split's files, with their checksums wherever those are known.

    Raises
    ------
    DataCorruptError
        A checksum does not agree, or a file is larger than any of this set; nothing is decoded then.
    """
    facts, form, names = source.facts, source.form, source.form.splits[split]
    if source.archived:
        if wrong := _mismatch(source.place, form.archive_digest):
            raise _corrupt(facts, *wrong)
        return _read_archive(source, names)
    files: dict[str, bytes] = {}
    wrong = []
    most = left = _largest(facts, split)
    for name in names:
        path = source.place / name
        left -= (size := path.stat().st_size)
        if left < 0:
            large = f"{path}: {size} bytes, expected at most {most} in all of {', '.join(names)}"
            raise _corrupt(facts, large, *wrong)
        files[name] = path.read_bytes()
        if name in form.digests:
            wrong += _mismatch(path, form.digests[name], files[name])
    if wrong:
        raise _corrupt(facts, *wrong)
    return files


def _read_archive(source: Source, names: Sequence[str]) -> dict[str, bytes]:
    """Members of an archive, by exact name; nothing is unpacked to disk."""
    folder = Path(source.form.folders[0]).name
    wanted = {f"{folder}/{name}": name for name in names}
    members: dict[str, bytes] = {}
    with tarfile.open(source.place, "r:gz") as archive:
        for member in archive:
            name = wanted.get(member.name.removeprefix("./"))
            if name is not None and (stream := archive.extractfile(member)) is not None:
                members[name] = stream.read()
            if len(members) == len(wanted):
                break
    return {name: members[name] for name in names}


def _decode(source: Source, split: Split, files: dict[str, bytes]) -> dict[str, Bytes]:
    facts, form = source.facts, source.form
    paths = {name: str(source.place / name) for name in files}
    if form.name in ("idx.gz", "idx"):
        most = 16 + facts.rows[split] * math.prod(facts.image)
        images, labels = (formats.read_idx(data, paths[name], most) for name, data in files.items())
        return {"images": images, "labels": labels}
    if form.name == "packed":
        labels = formats.read_labels_npz(files.pop("labels.npz"), paths["labels.npz"], f"{split}_labels")
        strips = track(files.items(), f"decoding {facts.title}, {split}")
        parts = [formats.read_webp_strips(data, paths[name]) for name, data in strips]
        return {"images": np.concatenate(parts), "labels": labels}
    coarse = facts.coarse_classes > 0
    batches = []
    for name, data in files.items():
        if form.name == "python":
            keys = ("coarse_labels", "fine_labels") if coarse else ("labels",)
            batches.append(formats.read_cifar_python(data, paths[name], keys))
        else:
            batches.append(formats.read_cifar_binary(data, paths[name], 2 if coarse else 1))
    labels, images = (np.concatenate(parts) for parts in zip(*batches))
    arrays = {"images": images, "labels": labels[:, -1].copy()}
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


def _status(facts: SetFacts) -> SetStatus:
    source = find(facts)
    if source is None:
        if facts.slow and all(_read_cache(facts, split) is not None for split in BOTH):
            return SetStatus(facts.name, facts.title, "ok", "decoded", _decoded_folder(), "only the decoded cache")
        return SetStatus(facts.name, facts.title, "absent", detail=f"wanted: {_wanted(facts)}")
    if source.archived:
        known = {source.place: source.form.archive_digest}
    else:
        known = {source.place / name: digest for name, digest in source.form.digests.items()}
    if wrong := [line for path, digest in known.items() for line in _mismatch(path, digest)]:
        return source.status("corrupt", str(_corrupt(facts, *wrong)))
    if source.archived or len(known) == len(source.form.files()):
        return source.status("ok", "every file has its published checksum")
    return source.status(
        "unverified", f"no file checksum is known for this form; `pathlens data check {facts.name}` decodes it"
    )


# --- importing --------------------------------------------------------------------------------------------------


def _find_for_import(facts: SetFacts, origin: Path) -> Source | None:
    """A copy of the set at `origin`, or a broken one that can only be this set, so that its error is reported."""
    for form in facts.forms:
        if origin.is_file():
            # browsers rename downloads ("cifar-10-python (1).tar.gz"), so the checksum is compared as well
            if form.archive and (origin.name == form.archive or not _mismatch(origin, form.archive_digest)):
                return Source(facts, form, origin, archived=True)
            continue
        for source in _places(facts, form, origin):
            if source.complete():
                return source
        here = Source(facts, form, origin)
        if here.complete() and _belongs(here):
            return here
    return None


def _belongs(source: Source) -> bool:
    """Whether files directly in the given folder are of this set: MNIST and Fashion-MNIST have the same names."""
    form, facts = source.form, source.facts
    if form.name not in ("idx.gz", "idx"):
        return True
    if form.digests:
        return any(not _mismatch(source.place / name, digest) for name, digest in form.digests.items())
    path = source.place / form.splits["test"][1]
    if path.stat().st_size > _largest(facts, "test"):
        return False
    try:  # unpacked files have no checksum: the labels decide
        labels = formats.read_idx(path.read_bytes(), str(path), 8 + facts.rows["test"])
    except FileFormatError:
        return False
    return _sha256(labels) == facts.arrays.get("test_labels")


def _copy(source: Source, verified: bool) -> Imported:
    form, folder = source.form, cache_folder() / "data" / source.form.folders[0]
    if source.archived:
        folder = folder.parent
        pairs = [(source.place, folder / form.archive)]
    else:
        pairs = [(source.place / name, folder / name) for name in form.files()]
    folder.mkdir(parents=True, exist_ok=True)
    total = 0
    for origin, target in track(pairs, f"importing {source.facts.title}"):
        total += origin.stat().st_size
        if not (target.exists() and target.samefile(origin)):
            _copy_file(origin, target)
    names = tuple(target.name for _, target in pairs)
    return Imported(source.facts.name, source.describe(), folder, names, total, verified)


def _copy_file(origin: Path, target: Path) -> None:
    with replacing(target) as temporary:
        shutil.copyfile(origin, temporary)
        if file_checksum(temporary) != file_checksum(origin):
            raise DataCorruptError(
                f"{origin}: the copy in {target.parent} differs from it, and was dropped. Check the disk."
            )


# --- the cache of decoded arrays --------------------------------------------------------------------------------


def _decoded_folder() -> Path:
    return cache_folder() / "decoded"


def _cache_paths(facts: SetFacts, split: str) -> dict[str, Path]:
    names = ("images", "labels", "coarse") if facts.coarse_classes else ("images", "labels")
    return {name: _decoded_folder() / f"{facts.name}-{split}-{name}.npy" for name in names}


def _read_cache(facts: SetFacts, split: Split) -> Loaded | None:
    """The cached arrays if every one has its checksum, else None: a damaged cache counts as none."""
    paths = _cache_paths(facts, split)
    try:
        if facts.arrays:
            expected = {name: facts.arrays[f"{split}_{name}"] for name in paths}
        else:  # no published array checksum: the one recorded when a checked archive was decoded
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
            with replacing(path) as temporary, temporary.open("wb") as file:
                np.save(file, loaded.arrays[name], allow_pickle=False)
        if not facts.arrays:
            digests = {name: _sha256(array) for name, array in loaded.arrays.items()}
            write_atomically(_decoded_folder() / f"{facts.name}-{split}.json", json.dumps(digests).encode())
    except OSError as error:
        warnings.warn(
            f"{facts.title}: the decoded arrays could not be saved in {_decoded_folder()} ({error}); the next "
            "load decodes again. Set XDG_CACHE_HOME to a folder with space.",
            PathlensWarning,
            stacklevel=4,
        )
