"""Versions of the weights: a member gets the same bits whole and as changes since any version that it has."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from sparse_rl.pool.weights import Changes, Versions, bytes_of, changes_of
from tests.helpers.pools import copied

SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9)


def apply(content, old):
    if not isinstance(content, Changes):
        return content
    new = old.copy().reshape(-1)
    new[content.places] = content.values
    return new.reshape(old.shape)


@given(st.data(), st.sampled_from([np.uint8, np.int16, np.int32, np.int64]), SHAPES)
def test_changes_make_the_new_array(data, dtype, shape):
    old = data.draw(arrays.arrays(dtype, shape, elements=st.integers(0, 2)))
    new = data.draw(arrays.arrays(dtype, shape, elements=st.integers(0, 2)) | st.just(old.copy()))
    found = changes_of(new, old)
    assert found.nbytes <= new.nbytes and np.array_equal(apply(found, old), new)
    if np.array_equal(new, old) and new.size and shape:  # a single number has no places
        assert isinstance(found, Changes) and not len(found.places)


@pytest.mark.parametrize("old", [np.zeros(5, np.int16), np.zeros((1, 4), np.int16), np.zeros(4, np.int32)])
def test_an_array_of_another_kind_is_sent_whole(old):
    new = np.ones(4, np.int16)
    assert changes_of(new, old) is new


def load(parts, weights):
    """As a member does."""
    for part in parts:
        for name, content in part.items():
            weights[name] = apply(content, weights.get(name)).copy()


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.sampled_from([0.0, 0.02, 0.2, 0.6]))
def test_members_of_any_version_get_the_same_bits(seed, keep, share):
    """They join whenever they like and miss versions; sometimes nobody compares, and what is trained may change."""
    draw = np.random.default_rng(seed)
    names, numbers = ["a", "b", "c"], [0, 4, 8, 9, 13, 20, 21]
    learner = {name: draw.integers(0, 9, (6, 7), np.int16) for name in names}
    kept = Versions(lambda part, needed: copied(part), lambda part: part)
    members = [({}, None) for _ in range(3)]
    for i, version in enumerate(numbers):
        if i == 4:
            learner["new"] = draw.integers(0, 9, 8, np.int16)
        for array in learner.values():
            moved = draw.random(array.shape) < share
            array[moved] += 1
        parts = ({name: array} for name, array in learner.items())
        whole = kept.publish(version, parts, numbers[max(0, i + 1 - keep)], compare=bool(draw.integers(4)))
        assert len(kept.kept) <= keep and whole == sum(array.nbytes for array in learner.values())
        for m, (weights, has) in enumerate(members):
            if draw.integers(2):
                refs = kept.offer(version).refs(has)
                assert sum(map(bytes_of, refs)) <= whole
                load(refs, weights)
                members[m] = weights, version
                assert weights.keys() == learner.keys()
                for name, array in learner.items():
                    assert np.array_equal(weights[name], array), name


def test_few_changes_are_few_bytes():
    kept, array = Versions(lambda part, needed: copied(part), lambda part: part), np.zeros(10_000, np.int16)
    kept.publish(1, [{"w": array}], 0, compare=True)
    array[::100] = 1
    kept.publish(2, [{"w": array}], 0, compare=True)
    array[50] = 1
    kept.publish(5, [{"w": array}], 0, compare=True)
    offer = kept.offer(5)
    assert [sum(map(bytes_of, offer.refs(has))) for has in (None, 1, 2, 3)] == [20_000, 606, 6, 20_000]


def test_a_part_that_changed_by_more_than_half_is_stored_once():
    stored = []
    kept = Versions(lambda part, needed: stored.append(needed) or copied(part), lambda part: part)
    kept.publish(1, [{"w": np.zeros(100, np.int32)}], 0, compare=True)
    kept.publish(2, [{"w": np.ones(100, np.int32)}], 0, compare=True)
    assert stored == [400, 400] and kept.offer(2).refs(1) == kept.offer(2).refs(None)
