"""Attacks the sticky split: growth, order, groups and a source's own splits must never move an image."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.core.artifacts import DatasetRef, Shard
from tasks.core.config import PrepareConfig
from tasks.core.errors import BadInput
from tasks.images.shards import ImageRow, Standing, write_layer, write_shards
from tasks.images.splits import Member, Splitter, check_classes, choose, splitter, uniform

CONFIG = PrepareConfig(val_share=0.15, test_share=0.2)
HEX = st.text("0123456789abcdef", min_size=64, max_size=64)
GIVEN = st.sampled_from([None, "train", "val", "test"])
MEMBERS = st.lists(st.builds(Member, HEX, st.none(), GIVEN), max_size=40, unique_by=lambda member: member.sha256)


def member(number: int, group: str | None = None, split: str | None = None) -> Member:
    return Member(f"{number:064x}", group, split)


@given(first=MEMBERS, more=MEMBERS, seed=st.integers(0, 2**31), data=st.data())
@settings(max_examples=60, deadline=None)
def test_growth_and_order_never_move_an_image(first: list[Member], more: list[Member], seed: int, data: st.DataObject) -> None:
    config = CONFIG.model_copy(update={"seed": seed})
    named = frozenset({"train", "test"})
    small = Splitter(config, named)
    before = {each.sha256: small.split_of(each) for each in first}
    grown = Splitter(config, named)
    everything = data.draw(st.permutations([*first, *(each for each in more if each.sha256 not in before)]))
    after = {each.sha256: grown.split_of(each) for each in everything}
    assert before.items() <= after.items()


@given(sha=HEX, seed=st.integers(0, 2**31), share=st.floats(0.05, 0.45))
@settings(max_examples=100, deadline=None)
def test_a_larger_test_share_only_adds_to_test(sha: str, seed: int, share: float) -> None:
    """Raising the share must not send an image from test to train either."""
    small = PrepareConfig(test_share=share, val_share=0.1, seed=seed)
    large = small.model_copy(update={"test_share": share + 0.3})
    if choose(Member(sha, None, None), frozenset(), small) == "test":
        assert choose(Member(sha, None, None), frozenset(), large) == "test"


@given(shas=st.lists(HEX, min_size=2, max_size=20, unique=True), group=st.text(max_size=8), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_a_group_never_straddles(shas: list[str], group: str, seed: int) -> None:
    assign = Splitter(CONFIG.model_copy(update={"seed": seed}))
    assert len({assign.split_of(Member(sha, group, None)) for sha in shas}) == 1


def test_no_group_name_can_pose_as_an_images_digest() -> None:
    sha = f"{7:064x}"
    assert Member(sha, None, None).key != Member("0" * 64, sha, None).key
    assert Member(sha, "", None).key != Member(sha, None, None).key, "an empty group is a group"


def test_shares_come_out_and_the_seed_matters() -> None:
    counts = Counter(choose(member(number), frozenset(), CONFIG) for number in range(20_000))
    assert abs(counts["test"] / 20_000 - 0.2) < 0.01
    assert abs(counts["val"] / 20_000 - 0.15) < 0.01
    other = CONFIG.model_copy(update={"seed": 1})
    moved = sum(choose(member(number), frozenset(), CONFIG) != choose(member(number), frozenset(), other) for number in range(2000))
    assert 800 < moved < 1300, "seeds must be independent: about 51 % of images differ"
    assert 0.0 <= min(uniform(str(n), 0) for n in range(1000)) < max(uniform(str(n), 0) for n in range(1000)) < 1.0


def test_the_split_is_the_one_of_every_past_release() -> None:
    """Pinned by value: changing the hash would move images between the test sets of models a year apart."""
    expected = ["train", "train", "train", "test", "train", "train", "train", "test", "val", "test", "train", "train"]
    assert [choose(member(number), frozenset(), CONFIG) for number in range(12)] == expected
    assert uniform("group:patient-3", 0) == 0.7623318906364279


def test_a_sources_own_split_is_kept_and_what_it_lacks_is_carved_from_its_train() -> None:
    numbers = range(400)
    named = frozenset({"train", "test"})
    assert {choose(member(n, split="test"), named, CONFIG) for n in numbers} == {"test"}
    assert {choose(member(n, split="val"), named, CONFIG) for n in numbers} == {"val"}
    carved = [choose(member(n, split="train"), named, CONFIG) for n in numbers]
    assert set(carved) == {"train", "val"}
    assert all((split == "val") == (choose(member(n), frozenset(), CONFIG) == "val") for n, split in zip(numbers, carved, strict=True))
    whole = frozenset({"train", "val", "test"})
    assert {choose(member(n, split="train"), whole, CONFIG) for n in numbers} == {"train"}
    assert {choose(member(n, split="train"), frozenset({"train", "val"}), CONFIG) for n in numbers} == {"train", "test"}
    assert {choose(member(n), whole, CONFIG) for n in numbers} == {"train", "val", "test"}, "images without a split go to their band"


def test_a_source_that_tears_a_group_is_refused_by_name() -> None:
    assign = Splitter(CONFIG, frozenset({"train", "test", "val"}))
    assign.split_of(member(1, "patient 7", "train"))
    with pytest.raises(BadInput, match="patient 7") as caught:
        assign.split_of(member(2, "patient 7", "test"))
    assert caught.value.code == "group_straddles"


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(BadInput) as caught:
        choose(member(1, split="holdout"), frozenset(), CONFIG)
    assert caught.value.code == "unknown_split"


def rows(start: int, count: int, split: str | None, group: str | None = None) -> list[ImageRow]:
    return [ImageRow(b"x", f"{n}.png", "a", f"{n:064x}", split, group) for n in range(start, start + count)]


def version(root: Path, shards: list[Shard], layers: tuple[Shard, ...] = ()) -> DatasetRef:
    return DatasetRef(classes=("a", "b"), counts={}, splits={"train": 1}, shards=tuple(shards), layers=layers).save(root)


def test_a_later_batch_that_first_names_a_test_split_moves_nothing(tmp_path: Path) -> None:
    """Attack: batch 1 names only train, so test is carved from it; batch 2 brings the source's test images."""
    data = tmp_path / "data"
    first = write_shards(data, 1, rows(0, 300, "train"), 10**9, "x")
    assign = splitter(version(tmp_path, first), CONFIG)
    before = [assign.split_of(member(n, split="train")) for n in range(300)]
    assert {"train", "val", "test"} == set(before)
    second = write_shards(data, 2, rows(300, 300, "train") + rows(600, 50, "test"), 10**9, "x")
    assign = splitter(version(tmp_path, [*first, *second]), CONFIG)
    assert [assign.split_of(member(n, split="train")) for n in range(300)] == before
    assert {assign.split_of(member(n, split="train")) for n in range(300, 600)} == {"train", "val"}, "the new train is left whole but for val"


def test_a_group_that_grows_across_such_a_batch_stays_whole(tmp_path: Path) -> None:
    data = tmp_path / "data"
    first = [row for n in range(60) for row in rows(n, 1, "train", f"g{n}")]
    second = [row for n in range(60) for row in rows(100 + n, 1, "train", f"g{n}")] + rows(600, 5, "test")
    shards = write_shards(data, 1, first, 10**9, "x") + write_shards(data, 2, second, 10**9, "x")
    assign = splitter(version(tmp_path, shards), CONFIG)
    for n in range(60):
        assert assign.split_of(member(n, f"g{n}", "train")) == assign.split_of(member(100 + n, f"g{n}", "train"))


def test_a_layer_that_names_a_split_counts_from_its_batch_on(tmp_path: Path) -> None:
    data = tmp_path / "data"
    shards = write_shards(data, 1, rows(0, 200, "train"), 10**9, "x") + write_shards(data, 2, rows(200, 200, "train"), 10**9, "x")
    layer = write_layer(data, 2, {f"{0:064x}": Standing("0.png", "a", "test")}, "x")
    assign = splitter(version(tmp_path, shards, (layer,)), CONFIG)
    assert "test" in {assign.split_of(member(n, split="train")) for n in range(1, 200)}
    assert "test" not in {assign.split_of(member(n, split="train")) for n in range(200, 400)}
    assert assign.split_of(member(0, split="test")) == "test"


def test_a_lost_shard_is_named(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "data", 1, rows(0, 3, "train"), 10**9, "x")
    (tmp_path / "data" / shards[0].file).unlink()
    with pytest.raises(BadInput) as caught:
        splitter(version(tmp_path, shards), CONFIG)
    assert caught.value.code == "artifact_missing"


def counts(**splits: dict[str, int]) -> dict[str, dict[str, int]]:
    return {"train": {}, "val": {}, "test": {}, **splits}


def test_a_class_that_is_missing_somewhere_is_named_with_its_count_and_the_knob() -> None:
    full = {"a": 5, "b": 5, "c": 5}
    with pytest.raises(BadInput, match="'b' has no image in test.*3 sound images.*prepare.seed") as caught:
        check_classes(("a", "b", "c"), counts(train={**full, "b": 2}, val={**full, "b": 1}, test={"a": 1, "c": 1}), frozenset())
    assert caught.value.code == "class_too_small"
    with pytest.raises(BadInput) as caught:
        check_classes(("a", "b", "c"), counts(train={"a": 1, "c": 1}, val=full, test=full), frozenset())
    assert caught.value.code == "class_not_in_train"
    with pytest.raises(BadInput, match="and 1 more classes") as caught:
        check_classes(("a", "b", "c"), counts(train={"a": 1}, val={"a": 1}, test={"a": 1}), frozenset())
    assert caught.value.code == "class_too_small"


def test_a_val_split_of_the_sources_own_may_lack_a_class_but_not_all() -> None:
    full = {"a": 5, "b": 5}
    check_classes(("a", "b"), counts(train=full, val={"a": 1}, test=full), frozenset({"train", "val"}))
    with pytest.raises(BadInput, match="val split"):
        check_classes(("a", "b"), counts(train=full, test=full), frozenset({"train", "val"}))
