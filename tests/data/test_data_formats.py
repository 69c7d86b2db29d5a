"""The decoders on good and on hostile bytes."""

from __future__ import annotations

import contextlib
import gzip
import os
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_sets import idx_bytes, planar, webp_strip

from pathlens.data import formats
from pathlens.errors import FileFormatError

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
PIXELS = planar(IMAGES)


@pytest.mark.parametrize("pack", [bytes, lambda data: gzip.compress(data)])
def test_idx_round_trip(pack):
    array = RNG.integers(0, 256, (3, 4, 5), dtype=np.uint8)
    assert np.array_equal(formats.read_idx(pack(idx_bytes(array)), "a"), array)


GOOD_IDX = idx_bytes(np.arange(30, dtype=np.uint8).reshape(5, 6))


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (GOOD_IDX[:-1], "there are 29"),
        (GOOD_IDX + b"x", "there are 31"),
        (b"", "magic"),
        (b"\x00\x00\x09\x01" + GOOD_IDX[4:], "magic"),
        (GOOD_IDX[:9], "too short"),
        (gzip.compress(GOOD_IDX, mtime=0)[:-9], "gzip"),
        # 2^96 bytes promised: in 64 bits the product wraps around to 0, the size that came
        (b"\x00\x00\x08\x04" + struct.pack(">4I", 2**31, 2**31, 2**31, 8), "promises"),
    ],
)
def test_idx_refuses(data, part):
    with pytest.raises(FileFormatError, match=part) as caught:
        formats.read_idx(data, "here.gz")
    assert "here.gz" in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=64))
def test_decoders_never_crash_on_noise(data):
    """Whatever the bytes: an array or a FileFormatError, nothing else."""
    for read in (
        lambda: formats.read_idx(data, "a"),
        lambda: formats.read_cifar_binary(data, "a", 1),
        lambda: formats.read_cifar_python(data, "a", ("labels",)),
        lambda: formats.read_webp_strips(data, "a"),
        lambda: formats.read_labels_npz(data, "a", "labels"),
    ):
        with contextlib.suppress(FileFormatError):
            read()


def test_cifar_binary():
    raw = np.hstack((np.array([[3, 9], [1, 8], [0, 7]], np.uint8), planar(IMAGES))).tobytes()
    labels, images = formats.read_cifar_binary(raw, "a", 2)
    assert labels.tolist() == [[3, 9], [1, 8], [0, 7]] and np.array_equal(images, IMAGES)
    for broken in (raw[:-1], b""):
        with pytest.raises(FileFormatError, match="3074"):
            formats.read_cifar_binary(broken, "a", 2)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
def test_cifar_python(protocol, order):
    batch = {"data": np.asarray(planar(IMAGES), order=order), b"labels": [1, 2, 3]}
    labels, images = formats.read_cifar_python(pickle.dumps(batch, protocol), "a", ("labels",))
    assert labels.tolist() == [[1], [2], [3]] and np.array_equal(images, IMAGES)


def test_cifar_python_as_python_2_wrote_it():
    """The published batches come from Python 2: byte strings, the old module name of NumPy's constructor."""
    raw = planar(IMAGES[:2]).tobytes()
    data = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87R"
        b"(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff"
        b"K\x00tb\x89T" + struct.pack("<I", len(raw)) + raw + b"tbU\x06labelsq\x08]q\x09(K\x03K\x07eu."
    )
    labels, images = formats.read_cifar_python(data, "a", ("labels",))
    assert labels.tolist() == [[3], [7]] and np.array_equal(images, IMAGES[:2])


class Attack:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_malicious_pickles_are_refused_unrun(tmp_path):
    mark = tmp_path / "pwned"
    attacks = [
        Attack(os.mkdir, str(mark)),
        Attack(eval, f"__import__('os').mkdir({str(mark)!r})"),
        Attack(getattr, os, "mkdir"),
        {"data": Attack(os.mkdir, str(mark)), "labels": []},
    ]
    for attack in attacks[:2] + attacks[3:]:
        with pytest.raises(FileFormatError, match="is not allowed"):
            formats.read_cifar_python(pickle.dumps(attack), "a", ("labels",))
    # the same through the one allowed codec function, and through attributes of an allowed name
    for data in (
        b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x03\x00\x00\x00hextR.",
        b"\x80\x04\x8c\x05numpy\x8c\x0edtype.__init__\x93.",
    ):
        with pytest.raises(FileFormatError, match="is not allowed"):
            formats.read_cifar_python(data, "a", ("labels",))
    assert not mark.exists()
    pickle.loads(pickle.dumps(attacks[0]))
    assert mark.exists(), "the attack itself works, so the refusal above meant something"


@pytest.mark.parametrize(
    ("batch", "part"),
    [
        ([1], "holds a list"),
        ({b"labels": [1]}, "no 'data'"),
        ({"data": PIXELS}, "no 'labels'"),
        ({"data": b"xx", "labels": [1]}, "is a bytes"),
        ({"data": PIXELS.astype(np.int16), "labels": [1, 2, 3]}, "not uint8"),
        ({"data": PIXELS[:, :9], "labels": [1, 2, 3]}, "shape"),
        ({"data": PIXELS, "labels": [1, 2]}, "list of 3"),
        ({"data": PIXELS, "labels": [1, 2, 300]}, "list of 3"),
        ({"data": PIXELS, "labels": [1, 2, 0.5]}, "list of 3"),
    ],
)
def test_cifar_python_refuses(batch, part):
    with pytest.raises(FileFormatError, match=part):
        formats.read_cifar_python(pickle.dumps(batch, 2), "a", ("labels",))


def test_webp_strips():
    part = webp_strip(IMAGES[:2]) + webp_strip(IMAGES[2:])
    assert np.array_equal(formats.read_webp_strips(part, "a"), IMAGES)
    for broken, why in (
        (part[:-3], "ends at byte"),
        (part + b"RIFF", "no WebP file"),
        (b"", "empty"),
        (part[:20] + bytes(200) + part[220:], "does not decode"),
        (webp_strip(IMAGES.reshape(-1, 32, 3)[:40]), "32 wide and a multiple of 32"),
    ):
        with pytest.raises(FileFormatError, match=why):
            formats.read_webp_strips(broken, "a")


def test_webp_without_pillow(monkeypatch):
    import sys

    from pathlens.errors import MissingExtraError

    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"pathlens\[images\]"):
        formats.read_webp_strips(b"RIFF", "a")


def test_labels_npz_refuses_objects(tmp_path):
    np.savez(tmp_path / "a.npz", labels=np.array([Attack(os.mkdir, str(tmp_path / "pwned"))], object), wide=np.ones(3))
    data = (tmp_path / "a.npz").read_bytes()
    for key, why in (("labels", "no readable"), ("other", "no readable"), ("wide", "expected uint8")):
        with pytest.raises(FileFormatError, match=why):
            formats.read_labels_npz(data, "a", key)
    assert not (tmp_path / "pwned").exists()
