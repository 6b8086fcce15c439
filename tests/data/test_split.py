"""Splits depend on content alone, keep equal texts together, and serve every class."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from minidl.data.digests import content_hash
from minidl.data.split import TEST, TRAIN, VALIDATION, split_by_hash, stratified_split

rows = st.lists(st.tuples(st.text(max_size=4), st.integers(0, 3)), min_size=1, max_size=60)


def test_the_hash_is_the_same_on_every_machine():
    assert content_hash("") == 0x9A271F2A916B0B6E
    assert content_hash("text \N{SNOWMAN}", 7) == 0x321B59612A6ECC9F


@given(rows, st.integers(0, 5), st.randoms())
def test_the_order_of_the_rows_is_irrelevant(pairs, seed, random):
    keys, classes = zip(*pairs, strict=True)
    sides = dict(zip(keys, stratified_split(keys, classes, 0.1, 0.2, seed), strict=True))
    shuffled = list(pairs)
    random.shuffle(shuffled)
    keys, classes = zip(*shuffled, strict=True)
    assert sides == dict(zip(keys, stratified_split(keys, classes, 0.1, 0.2, seed), strict=True))


@given(st.integers(1, 6), st.floats(0, 0.9), st.floats(0, 0.9))
def test_every_class_is_trained_at_any_shares(count, validation, test):
    assert TRAIN in stratified_split([str(i) for i in range(count)], [0] * count, validation, test)


@given(st.integers(3, 12), st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_three_of_a_class_serve_every_side_at_any_shares(count, validation, test):
    sides = stratified_split([str(i) for i in range(count)], [0] * count, validation, test)
    assert set(sides) == {TRAIN, VALIDATION, TEST}


@given(rows)
def test_equal_texts_stay_together_and_every_class_is_trained(pairs):
    keys, classes = zip(*pairs, strict=True)
    sides = stratified_split(keys, classes, 0.1, 0.2)
    assert len({(key, side) for key, side in zip(keys, sides, strict=True)}) == len(set(keys))
    first = {}
    for key, cls in pairs:
        first[key] = min(cls, first.get(key, cls))
    for cls in set(first.values()):
        mine = Counter(side for key, side in set(zip(keys, sides, strict=True)) if first[key] == cls)
        assert mine[TRAIN] >= 1
        assert mine[TEST] >= (sum(mine.values()) >= 2)
        assert mine[VALIDATION] >= (sum(mine.values()) >= 3)


def test_shares_are_kept_in_each_class():
    keys = [f"text {i}" for i in range(300)]
    classes = [i % 3 for i in range(300)]
    sides = stratified_split(keys, classes, 0.1, 0.2)
    counts = Counter(zip(classes, sides, strict=True))
    assert all(counts[cls, TEST] == 20 and counts[cls, VALIDATION] == 10 for cls in range(3))


def test_split_by_hash_keeps_a_key_when_others_come():
    keys = [f"text {i}" for i in range(1000)]
    sides = split_by_hash(keys, 0.1, 0.2)
    assert split_by_hash(keys[500:], 0.1, 0.2) == sides[500:]
    counts = Counter(sides)
    assert 150 < counts[TEST] < 250
    assert 60 < counts[VALIDATION] < 140
