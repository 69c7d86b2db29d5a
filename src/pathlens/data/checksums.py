"""The published image sets on disk: file names, folders and checksums.

A checksum of a file shows which file is damaged. The SHA-256 of a decoded uint8 array holds for every form of a set.
None is known for CIFAR-100, which is checked by the published MD5 of its archive or of its batch files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FormName = Literal["idx.gz", "idx", "packed", "python", "binary"]


@dataclass(frozen=True)
class Form:
    """One form in which a set is published: its files, their folders under a data folder, their checksums.

    A checksum of 64 hexadecimal digits is a SHA-256, one of 32 an MD5.
    """

    name: FormName
    splits: Mapping[str, tuple[str, ...]]  # split -> the files it needs, in the order of the rows
    folders: tuple[str, ...]  # under a data folder; the first is where an import puts the files
    digests: Mapping[str, str] = field(default_factory=dict)  # file -> checksum, where one is known
    archive: str = ""  # a tar.gz of the folder, looked for beside each of `folders`
    archive_digest: str = ""

    def files(self, splits: tuple[str, ...] = ("train", "test")) -> tuple[str, ...]:
        """The files that the given splits need, each once."""
        return tuple(dict.fromkeys(name for split in splits for name in self.splits[split]))


@dataclass(frozen=True)
class SetFacts:
    """A published image set: rows, image shape (height, width, channels if any), classes, array checksums, forms."""

    name: str
    title: str
    rows: Mapping[str, int]
    image: tuple[int, ...]
    label_names: tuple[str, ...]
    forms: tuple[Form, ...]
    arrays: Mapping[str, str] = field(default_factory=dict)  # "train_images" -> SHA-256 of the uint8 bytes, C order
    coarse_classes: int = 0  # CIFAR-100 only: superclasses, a second label per row
    slow: bool = False  # decoding takes seconds, so decoded arrays are kept in the user's cache

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.label_names)


_IDX_SPLITS = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def _idx_forms(folders: tuple[str, ...], digests: Mapping[str, str]) -> tuple[Form, ...]:
    zipped = {split: tuple(f"{name}.gz" for name in names) for split, names in _IDX_SPLITS.items()}
    return Form("idx.gz", zipped, folders, digests), Form("idx", _IDX_SPLITS, folders)


_MNIST_FILES = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
_MNIST_ARRAYS = {
    "train_images": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
    "train_labels": "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
    "test_images": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
    "test_labels": "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
}
_FASHION_FILES = {
    "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
}
_FASHION_ARRAYS = {
    "train_images": "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
    "train_labels": "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
    "test_images": "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
    "test_labels": "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
}
_CIFAR10_PACKED_FILES = {
    "train_00.webps": "3241b40395e3204340dd566063202d49bc2eb53ff6100960a37f33a71317209c",
    "train_01.webps": "b039f36f383ef24de3bbe6de78a50e6e974f1a8bde582d7335845a25c6223041",
    "train_02.webps": "eaa6735d0ee5e22a61d5870897d5b14810fb1f06433e6b3cfa3cda68576fbcf9",
    "train_03.webps": "554e80187ad94d02531ba16503bb5ebc5a1d1de758cd909ab46256903436892c",
    "train_04.webps": "c2ef7b53331e2c12cbdd07ae8b5577bf82b1745ce33ab2bb05e5b854724dab12",
    "train_05.webps": "7b4d16e236bf5d6b219e98f71b3376d0bbe496a5fd6e766cec3707b6d37dc1a4",
    "train_06.webps": "ba2b5a98cbb7755ea932102910fe1b292503327298ee39e170e0318250a8e03a",
    "train_07.webps": "4a52e2fdef851729b3d6212ba95d2f90e84c10e01e456a47794802089ccecacb",
    "train_08.webps": "e9110437e61a4cf6ade7318dd0b7939f4dcba286879b154f0d28b7ebe4d5801b",
    "train_09.webps": "8594022ff10f390e8e2b8129f0ff54892136a40c79795b4812e77c65f57229bc",
    "test_00.webps": "f6cf9a66bb553a1548c7fdf489e1b26d4dbf783e978501c9e1b4004932b9fa1b",
    "test_01.webps": "4fd90dd87e7f67cc80273e7097f385f0ef44629a0eaa56e1124c33f9f0a4b582",
    "labels.npz": "a1441085c89dd472b614653097c1a01c01197743912ccdc5c1e1c88d34003d65",
}
_CIFAR10_ARRAYS = {
    "train_images": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
    "test_images": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
    "train_labels": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
    "test_labels": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
}
_CIFAR10_PYTHON_FILES = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
_CIFAR100_PYTHON_FILES = {
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
}

_BATCHES = {"train": tuple(f"data_batch_{k}" for k in range(1, 6)), "test": ("test_batch",)}
_STRIPS = {
    "train": (*(f"train_{k:02d}.webps" for k in range(10)), "labels.npz"),
    "test": ("test_00.webps", "test_01.webps", "labels.npz"),
}

_CIFAR100_NAMES = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can "
    "castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin "
    "elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster "
    "man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck "
    "pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk "
    "skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger "
    "tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)

MNIST = SetFacts(
    name="mnist",
    title="MNIST",
    rows={"train": 60000, "test": 10000},
    image=(28, 28),
    label_names=tuple("0123456789"),
    forms=_idx_forms(("mnist", "MNIST/raw", "MNIST"), _MNIST_FILES),
    arrays=_MNIST_ARRAYS,
)

FASHION_MNIST = SetFacts(
    name="fashion_mnist",
    title="Fashion-MNIST",
    rows={"train": 60000, "test": 10000},
    image=(28, 28),
    label_names=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    forms=_idx_forms(("fashion-mnist", "fashion_mnist", "FashionMNIST/raw", "FashionMNIST"), _FASHION_FILES),
    arrays=_FASHION_ARRAYS,
)

CIFAR10 = SetFacts(
    name="cifar10",
    title="CIFAR-10",
    rows={"train": 50000, "test": 10000},
    image=(32, 32, 3),
    label_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    forms=(
        Form("packed", _STRIPS, ("cifar10", "cifar-10"), _CIFAR10_PACKED_FILES),
        Form(
            "python",
            _BATCHES,
            ("cifar10/cifar-10-batches-py", "cifar-10-batches-py"),
            _CIFAR10_PYTHON_FILES,
            "cifar-10-python.tar.gz",
            "c58f30108f718f92721af3b95e74349a",
        ),
        Form(
            "binary",
            {split: tuple(f"{name}.bin" for name in names) for split, names in _BATCHES.items()},
            ("cifar10/cifar-10-batches-bin", "cifar-10-batches-bin"),
            archive="cifar-10-binary.tar.gz",
            archive_digest="c32a1d4ab5d03f1284b67883e8d87530",
        ),
    ),
    arrays=_CIFAR10_ARRAYS,
    slow=True,
)

CIFAR100 = SetFacts(
    name="cifar100",
    title="CIFAR-100",
    rows={"train": 50000, "test": 10000},
    image=(32, 32, 3),
    label_names=tuple(_CIFAR100_NAMES.split()),
    forms=(
        Form(
            "python",
            {"train": ("train",), "test": ("test",)},
            ("cifar100/cifar-100-python", "cifar-100-python"),
            _CIFAR100_PYTHON_FILES,
            "cifar-100-python.tar.gz",
            "eb9058c3a382ffc7106e4002c42a8d85",
        ),
        Form(
            "binary",
            {"train": ("train.bin",), "test": ("test.bin",)},
            ("cifar100/cifar-100-binary", "cifar-100-binary"),
            archive="cifar-100-binary.tar.gz",
            archive_digest="03b5dce01913d631647c71ecec9e9cb8",
        ),
    ),
    coarse_classes=20,
    slow=True,
)

SETS: dict[str, SetFacts] = {facts.name: facts for facts in (MNIST, FASHION_MNIST, CIFAR10, CIFAR100)}
