"""Rows in training order: it depends on the seed and the epoch, and a run can go on at any position."""

import warnings

import datasets
import pytest
import torch

from comlrl.data import RowSource

ROWS = [{"prompt": f"row {i}", "n": i} for i in range(23)]


def read(source, epoch=0, start=0, size=4):
    """(row id, row) of the rest of an epoch, taken as a trainer does it."""
    pairs = []
    while True:
        batch = source.take(epoch, start + len(pairs), size)
        pairs += batch
        if source.exhausted(start + len(pairs), len(batch), size):
            return pairs


def ids(source, epoch=0, start=0, size=4):
    return [i for i, _ in read(source, epoch, start, size)]


def numbers(source, epoch=0, start=0):
    return [row["n"] for _, row in read(source, epoch, start)]


def test_order_depends_on_seed_and_epoch_only():
    source = RowSource(ROWS, "train_dataset", seed=3, shuffle=True)
    order = ids(source)
    assert sorted(order) == list(range(23))
    assert order != sorted(order)
    torch.manual_seed(99)  # nobody else's random numbers matter
    assert ids(RowSource(ROWS, "train_dataset", 3, True), size=7) == order
    assert ids(source) == order
    assert len({tuple(ids(source, epoch)) for epoch in range(5)}) == 5
    assert ids(RowSource(ROWS, "train_dataset", 4, True)) != order
    assert ids(RowSource(ROWS, "train_dataset", 4, True)) != ids(source, epoch=1)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_run_goes_on_at_any_position(shuffle):
    source = RowSource(ROWS, "train_dataset", 0, shuffle)
    whole = ids(source, epoch=2)
    for start in (0, 1, 8, 22, 23, 30):
        assert ids(source, epoch=2, start=start) == whole[start:]
    assert shuffle or whole == list(range(23))


def test_batches_have_the_size_and_rows_their_number():
    source = RowSource(ROWS, "train_dataset", 0, True)
    assert [len(source.take(0, start, 5)) for start in (0, 5, 20, 23, 40)] == [5, 5, 3, 0, 0]
    assert all(row == ROWS[i] for i, row in read(source))
    assert len(source) == 23


def test_rows_may_be_changed_without_harm_to_the_data():
    source = RowSource(ROWS, "train_dataset", 0, False)
    source.take(0, 0, 1)[0][1]["prompt"] = "changed"
    source.first(1)[0][1]["prompt"] = "changed"
    assert ROWS[0]["prompt"] == "row 0"


def test_first_rows_come_in_their_own_order():
    source = RowSource(ROWS, "eval_dataset", 0, shuffle=True)
    assert source.first(3) == [(i, ROWS[i]) for i in range(3)]
    assert len(source.first(None)) == 23
    assert source.first(99) == source.first(None)
    assert source.first(0) == []


def test_a_hugging_face_dataset():
    source = RowSource(datasets.Dataset.from_list(ROWS), "train_dataset", 3, True)
    assert len(source) == 23
    assert ids(source) == ids(RowSource(ROWS, "train_dataset", 3, True))
    assert numbers(source, start=5) == ids(source, start=5)
    assert source.first(2) == [(0, ROWS[0]), (1, ROWS[1])]


class Squares(torch.utils.data.Dataset):
    """A map-style dataset: no Sequence, and it never raises the IndexError that would end a plain `for`."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return {"prompt": str(index**2)}


def test_a_torch_dataset():
    source = RowSource(Squares(), "train_dataset", 0, False)
    assert [row["prompt"] for _, row in read(source, size=2)] == ["0", "1", "4", "9", "16"]
    assert source.first(None) == source.first(9) == [(i, {"prompt": str(i**2)}) for i in range(5)]


class Stream:
    """Iterable, without len: each epoch reads it anew."""

    def __init__(self):
        self.reads = 0

    def __iter__(self):
        self.reads += 1
        yield from ROWS


class TorchStream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from ROWS


def from_generator():
    return datasets.IterableDataset.from_generator(lambda: iter(ROWS))


@pytest.mark.parametrize("build", [Stream, TorchStream, from_generator])
def test_iterables_come_in_their_own_order_and_can_be_read_again(build):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source = RowSource(build(), "train_dataset", 3, shuffle=False)
    assert len(source) == 0  # unknown
    for epoch in range(2):
        assert ids(source, epoch) == list(range(23))
        assert numbers(source, epoch, start=9) == ids(source, epoch, start=9) == list(range(9, 23))
    assert source.first(2) == [(0, ROWS[0]), (1, ROWS[1])]


@pytest.mark.parametrize("build", [Stream, TorchStream, from_generator])
def test_iterables_warn_that_shuffle_is_ignored(build):
    with pytest.warns(UserWarning, match=r"train_dataset is an iterable: shuffle is ignored.*IterableDataset\.shuffle"):
        source = RowSource(build(), "train_dataset", 3, shuffle=True)
    assert ids(source) == list(range(23))


def test_a_stream_that_shuffles_itself_is_told_the_epoch():
    stream = from_generator().shuffle(seed=5, buffer_size=10)
    source = RowSource(stream, "train_dataset", 0, shuffle=False)
    first, second = numbers(source, 0), numbers(source, 1)
    assert sorted(first) == sorted(second) == list(range(23))
    assert first != second
    assert numbers(source, 0) == first
    assert numbers(source, 0, start=6) == first[6:]


def test_a_stream_is_not_read_further_than_needed():
    class Endless:
        def __iter__(self):
            for i in range(10**12):
                assert i < 20, "read too far"
                yield {"prompt": str(i)}

    source = RowSource(Endless(), "train_dataset", 0, shuffle=False)
    assert [i for i, _ in source.take(0, 5, 4)] == [5, 6, 7, 8]
    assert [i for i, _ in source.take(0, 9, 4)] == [9, 10, 11, 12]
    assert len(source.first(3)) == 3


def test_a_stream_is_read_once_an_epoch():
    stream = Stream()
    source = RowSource(stream, "train_dataset", 0, shuffle=False)
    assert len(read(source, size=3)) == 23
    assert stream.reads == 1
    assert source.take(0, 23, 3) == []
    assert stream.reads == 1
    assert len(read(source, epoch=1)) == 23
    assert stream.reads == 2


@pytest.mark.parametrize("data", [ROWS, Stream()])
def test_rows_can_be_fetched_by_id(data):
    source = RowSource(data, "train_dataset", 0, shuffle=False)
    read(source)
    fetched = source.fetch(0, {7, 3})
    assert {i: fetched[i] for i in (3, 7)} == {3: ROWS[3], 7: ROWS[7]}
    assert source.fetch(0, set()) == {}
    assert ids(source, start=5) == list(range(5, 23))


def test_no_data():
    for nothing in (None, []):
        source = RowSource(nothing, "eval_dataset", 0, True)
        assert len(source) == 0
        assert ids(source) == []
        assert source.first(None) == []


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (7, "train_dataset must be a sequence or an iterable of rows, not int"),
        (["a", "b"], "train_dataset: rows must be mappings .* not str"),
        ("text", "train_dataset: rows must be mappings .* not str"),
        ({"prompt": ["a", "b"]}, "train_dataset must be .* not a mapping of prompt"),
        (datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)), "a mapping of train; choose a split"),
        (
            (row for row in ROWS),
            r"train_dataset is a generator, which can be read once; give list\(train_dataset\)",
        ),
        (iter(ROWS), "train_dataset is a list_iterator, which can be read once"),
    ],
)
def test_what_is_no_dataset_is_refused(data, match):
    with pytest.raises(ValueError, match=match):
        RowSource(data, "train_dataset", 0, False)
