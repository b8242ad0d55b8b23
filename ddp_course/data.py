"""Two real data sets that are on the machine already, and loaders that deal them out to the ranks.

`digits`: 1797 scans of handwritten digits, 8×8 pixels, inside scikit-learn. `characters`: the
Python manual, inside Python's standard library. Nothing is downloaded.
"""

import gzip
import importlib.util
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from .process_group import this_rank

TRAIN_DIGITS = 1437  # four fifths of the 1797


def digits(seed: int = 0) -> tuple[TensorDataset, TensorDataset]:
    """Return (train, test) of scikit-learn's digits, split by `seed`: 1437 and 360 images.

    Each item is (x, y): x float32 [64], y int64 [] in 0…9. Both parts are normalised with one mean
    and one standard deviation, those of the training part. Raises RuntimeError without
    scikit-learn.
    """
    pixels, labels = _read_digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    pixels, labels = pixels[order], labels[order]
    # The test part must not have a say in the normalisation: it stands for data not yet seen.
    seen = pixels[:TRAIN_DIGITS]
    pixels = (pixels - seen.mean()) / seen.std()
    train = TensorDataset(pixels[:TRAIN_DIGITS], labels[:TRAIN_DIGITS])
    return train, TensorDataset(pixels[TRAIN_DIGITS:], labels[TRAIN_DIGITS:])


def _read_digits():
    # scikit-learn's file without scikit-learn's import, which costs a second in every rank.
    sklearn = importlib.util.find_spec("sklearn")
    if sklearn is None:
        raise RuntimeError(
            "scikit-learn, which holds the digits, is missing: pip install scikit-learn"
        )
    file = Path(sklearn.origin).parent / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(file, "rt") as lines:
        rows = torch.tensor([[float(value) for value in line.split(",")] for line in lines])
    return rows[:, :-1].contiguous(), rows[:, -1].long()


class Characters(Dataset):
    """Windows of `context` characters of `text`, each with the same window one character later.

    Item i is (x, y), both int64 [context]: y[t] is the character that follows x[t]. Windows do not
    overlap, so that an epoch asks for every character once. `vocabulary` is a string of all
    characters; a character's number is its place in it.
    """

    def __init__(self, text: str, vocabulary: str, context: int):
        _check_positive("context", context)
        self.vocabulary, self.context = vocabulary, context
        self._number = {character: number for number, character in enumerate(vocabulary)}
        self.data = self.encode(text)
        if len(self) < 1:
            raise ValueError(f"context={context} is longer than the text ({len(text)} characters).")

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        window = self.data[index * self.context : (index + 1) * self.context + 1]
        return window[:-1], window[1:]

    def encode(self, text: str) -> torch.Tensor:
        """Return the characters' numbers, int64 [len(text)]; ValueError for an unknown one."""
        unknown = sorted(set(text) - set(self._number))
        if unknown:
            raise ValueError(f"characters that are not in the vocabulary: {''.join(unknown)!r}")
        return torch.tensor([self._number[character] for character in text], dtype=torch.int64)

    def decode(self, numbers: torch.Tensor) -> str:
        """Return the text of these numbers, the opposite of `encode`."""
        return "".join(self.vocabulary[number] for number in numbers.tolist())


def characters(context: int = 64, seed: int = 0) -> tuple[Characters, Characters]:
    """Return (train, test) of the Python manual's text, split by paragraphs nine to one.

    `seed` chooses which tenth is the test text. The text is that of this Python's own manual, so
    its length and vocabulary differ a little between Python versions.
    """
    paragraphs = _manual()
    vocabulary = "".join(sorted(set("\n".join(paragraphs))))
    first, last = (len(paragraphs) * (seed % 10 + k) // 10 for k in (0, 1))
    train, test = paragraphs[:first] + paragraphs[last:], paragraphs[first:last]
    return tuple(Characters("\n\n".join(part), vocabulary, context) for part in (train, test))


def _manual() -> list[str]:
    from pydoc_data.topics import topics

    # Topics repeat one another's paragraphs: keep the first of each, or the test text would hold
    # text that was trained on.
    unique = {}
    for paragraph in "\n\n".join(topics.values()).split("\n\n"):
        unique.setdefault(" ".join(paragraph.split()), paragraph)
    return list(unique.values())


def shard(
    dataset: Dataset, micro_batch: int, *, shuffle: bool = True, seed: int = 0, workers: int = 0
) -> DataLoader:
    """Return a DataLoader over this rank's share of the data set, `micro_batch` items at a time.

    Every rank gets equally many batches: a few items come twice where the number of ranks does not
    divide the data (so evaluate with `exact_shard`). Call `loader.sampler.set_epoch(epoch)` before
    every epoch, else each has the same order. Without a process group: the whole data set.
    Reproducible by `seed`, also in its worker processes, and leaves torch's global generator alone.
    """
    _check_positive("micro_batch", micro_batch)
    _check_filled(dataset)
    me = this_rank()
    return DataLoader(
        dataset,
        batch_size=micro_batch,
        sampler=DistributedSampler(dataset, me.world_size, me.rank, shuffle=shuffle, seed=seed),
        num_workers=workers,
        generator=torch.Generator().manual_seed(seed + me.rank),
        pin_memory=me.device.type == "cuda",
    )


def exact_shard(dataset: Dataset, micro_batch: int) -> DataLoader:
    """Return a DataLoader over items rank, rank + world_size, …: each item on exactly one rank.

    For evaluation. Ranks may hold different numbers of batches, even none: no collective inside the
    loop over it; sum up first, then all-reduce the sums.
    """
    _check_positive("micro_batch", micro_batch)
    _check_filled(dataset)
    me = this_rank()
    mine = range(me.rank, len(dataset), me.world_size)
    return DataLoader(dataset, micro_batch, sampler=mine, pin_memory=me.device.type == "cuda")


def _check_positive(name, value):
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}.")


def _check_filled(dataset):
    if len(dataset) == 0:
        raise ValueError("the data set is empty: there is nothing to share out.")
