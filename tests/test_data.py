"""The embedded data sets, and how loaders deal them out to the ranks."""

import subprocess
import sys

import pytest
import torch
from torch.utils.data import TensorDataset

from ddp_course import launch, this_rank
from ddp_course.data import Characters, characters, digits, exact_shard, shard


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    x, y = (torch.cat(part) for part in zip(*(part.tensors for part in digits()), strict=True))
    pixels = (x - x.min()) / (x.max() - x.min()) * 16  # normalised values back to 0…16
    assert (pixels - pixels.round()).abs().max() < 1e-4
    found = torch.cat([pixels.round().long(), y[:, None]], dim=1)
    bunch = load_digits()
    expected = torch.cat([torch.tensor(bunch.data), torch.tensor(bunch.target)[:, None]], dim=1)
    assert sorted(found.tolist()) == sorted(expected.long().tolist())


def test_digits_are_split_normalised_and_seeded():
    train, test = digits()
    (x, y), (test_x, test_y) = train.tensors, test.tensors
    assert (x.shape, test_x.shape) == ((1437, 64), (360, 64))
    assert (x.dtype, y.dtype, test_y.dtype) == (torch.float32, torch.int64, torch.int64)
    assert y.bincount().min() > 100  # shuffled: every class in the training part
    assert abs(x.mean()) < 1e-5
    assert abs(x.std() - 1) < 1e-5
    assert abs(test_x.mean()) > 1e-4  # the test part had no say
    assert torch.equal(digits(0)[0].tensors[1], y)
    assert not torch.equal(digits(1)[0].tensors[1], y)


def test_reading_digits_imports_neither_scikit_learn_nor_matplotlib():
    code = (
        "import sys, ddp_course.data as data; data.digits(); data.characters(); "
        "print([name for name in ('sklearn', 'matplotlib', 'pandas') if name in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.stdout.strip() == "[]", process.stderr


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install scikit-learn"):
        digits()


def test_character_windows_cover_the_text_once():
    train, test = characters(context=50)
    for part in (train, test):
        x, y = (torch.cat(column) for column in zip(*part, strict=True))
        assert len(x) == len(part) * 50
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(x[1:], y[:-1])  # each target is the next character
        assert part.decode(x)[:30].isprintable() or "\n" in part.decode(x)[:30]
        assert part[0][0].shape == part[len(part) - 1][1].shape == (50,)
    assert len(train) > 5 * len(test) > 100
    assert train.vocabulary == test.vocabulary == "".join(sorted(set(train.vocabulary)))


def test_encode_and_decode_are_opposites():
    train, _ = characters()
    text = "for rank in range(world_size):\n    pass"
    assert train.decode(train.encode(text)) == text
    with pytest.raises(ValueError, match="not in the vocabulary: '☃'"):
        train.encode("a ☃")


@pytest.mark.parametrize("seed", [0, 4, 9])
def test_no_test_paragraph_was_trained_on(seed):
    def paragraphs(part):
        whole = part.decode(torch.cat([x for x, _ in part])).split("\n\n")[:-1]
        return {" ".join(paragraph.split()) for paragraph in whole}

    train, test = map(paragraphs, characters(seed=seed))
    assert len(train) > 5 * len(test) > 100
    assert not train & test


def test_the_seed_chooses_another_test_text():
    texts = [characters(seed=seed)[1].data for seed in (0, 0, 1)]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0][:1000], texts[2][:1000])


def test_windows_know_their_end():
    part = Characters("abcdefg", "abcdefg", context=3)
    assert [part.decode(x) + part.decode(y) for x, y in part] == ["abcbcd", "defefg"]
    with pytest.raises(IndexError):
        part[2]


NUMBERS = TensorDataset(torch.arange(23), torch.arange(23))


def indices(epochs, **options):
    """Return by epoch the batches of this rank, and whether torch's generator was left alone."""
    before = torch.get_rng_state()
    loader = shard(NUMBERS, 4, **options)
    found = []
    for epoch in epochs:
        loader.sampler.set_epoch(epoch)
        found.append([x.tolist() for x, _ in loader])
    return found, torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shards_deal_out_everything_in_equally_many_batches(world_size):
    ranks = launch(indices, [0], nproc=world_size, timeout=60).values
    assert all(untouched for _, untouched in ranks)
    assert len({len(epochs[0]) for epochs, _ in ranks}) == 1
    dealt = [number for epochs, _ in ranks for batch in epochs[0] for number in batch]
    assert set(dealt) == set(range(23))
    assert len(dealt) == -(-23 // world_size) * world_size  # padded to a multiple


def test_shards_repeat_by_seed_and_change_by_epoch():
    first, again, other = (
        [epochs for epochs, _ in launch(indices, [0, 1, 0], timeout=60, seed=seed).values]
        for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other
    for epochs in first:
        assert epochs[0] == epochs[2]
        assert epochs[0] != epochs[1]


def test_without_shuffle_the_order_is_the_data_sets():
    (first, _), (second, _) = launch(indices, [0, 1], shuffle=False, timeout=60).values
    assert sum(first[0], [])[:3] == [0, 2, 4]
    assert sum(second[0], [])[:3] == [1, 3, 5]
    assert first[0] == first[1]


def test_without_a_process_group_a_shard_is_everything():
    ((batches,), _) = indices([0])
    assert sorted(sum(batches, [])) == list(range(23))


class Noisy(torch.utils.data.Dataset):
    """Items with random augmentation, as a worker process sees it."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.randint(10**9, ())


def with_workers():
    noise = torch.cat(list(shard(Noisy(), 2, workers=2))).tolist()
    return indices([0, 1], workers=2)[0], noise


def test_worker_processes_read_the_same_and_their_noise_repeats_by_rank():
    plain = [epochs for epochs, _ in launch(indices, [0, 1], timeout=60).values]
    first, again = (launch(with_workers, timeout=60).values for _ in range(2))
    assert [epochs for epochs, _ in first] == plain
    assert first == again
    assert len({number for _, noise in first for number in noise}) == 8  # no rank repeats another


def exact(count):
    data = TensorDataset(torch.arange(count))
    return [x.tolist() for (x,) in exact_shard(data, 4)]


@pytest.mark.parametrize("world_size, count", [(1, 9), (2, 9), (3, 23), (3, 2)])
def test_exact_shards_hold_each_item_once(world_size, count):
    ranks = launch(exact, count, nproc=world_size, timeout=60).values
    for rank, batches in enumerate(ranks):
        assert sum(batches, []) == list(range(rank, count, world_size))
        assert all(len(batch) <= 4 for batch in batches)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: shard(NUMBERS, 0), "micro_batch must be a whole number of at least 1, not 0"),
        (lambda: shard(NUMBERS, True), "micro_batch must be a whole number"),
        (lambda: exact_shard(NUMBERS, 2.5), "micro_batch must be a whole number"),
        (lambda: shard([], 4), "the data set is empty"),
        (lambda: exact_shard([], 4), "the data set is empty"),
        (lambda: characters(context=0), "context must be a whole number of at least 1, not 0"),
        (lambda: characters(context=10**7), "context=10000000 is longer than the text"),
    ],
)
def test_bad_arguments_are_one_clear_line(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_this_process_is_rank_0_of_1():
    assert (this_rank().rank, this_rank().world_size) == (0, 1)
