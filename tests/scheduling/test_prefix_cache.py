"""Page counts and the prefix tree, against a model that keeps every published prefix in a dict."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.scheduling.prefix_cache import OutOfPages, PagePool, PrefixTree, Snapshots

SIZE = 2


def make(num_pages=9):
    pool = PagePool(num_pages)
    return pool, PrefixTree(pool, SIZE)


def publish(pool, tree, tokens):
    """Publish like a sequence that computes all of `tokens` and leaves."""
    pages = pool.alloc(len(tokens) // SIZE)
    tree.insert(tokens, pages, len(tokens), leaving=True)
    pool.release(pages)
    return pages


def test_pool_hands_out_every_page_but_the_dummy_once():
    pool = PagePool(5)
    assert pool.free == 4
    assert sorted(pool.alloc(1) + pool.alloc(3)) == [1, 2, 3, 4]
    assert pool.free == 0
    assert [pool.refcount(page) for page in range(5)] == [0, 1, 1, 1, 1]


def test_pool_takes_nothing_when_it_cannot_give_all():
    pool = PagePool(4)
    pool.alloc(1)
    with pytest.raises(OutOfPages, match="3 pages requested, 2 of 3 are free"):
        pool.alloc(3)
    assert pool.free == 2


def test_page_is_free_when_its_last_holder_lets_go():
    pool = PagePool(3)
    (page,) = pool.alloc(1)
    pool.retain([page])
    pool.release([page])
    assert (pool.refcount(page), pool.free) == (1, 1)
    pool.release([page])
    assert (pool.refcount(page), pool.free) == (0, 2)


def test_miscounting_is_an_error():
    pool, tree = make()
    with pytest.raises(ValueError, match="page 3 was released more often"):
        pool.release([3])
    with pytest.raises(ValueError, match="page 0 can't be retained"):
        pool.retain([0])
    (page,) = publish(pool, tree, [1, 2])
    with pytest.raises(ValueError, match="released more often"):
        pool.release([page])  # that hold is the tree's
    with pytest.raises(ValueError, match="in the prefix tree already"):
        tree.insert([3, 4], [page], 2)
    with pytest.raises(ValueError, match="at least 2 pages"):
        PagePool(1)
    with pytest.raises(ValueError, match="page_size must be at least 1"):
        PrefixTree(pool, 0)


def test_match_finds_whole_pages_within_the_limit():
    pool, tree = make()
    pages = publish(pool, tree, [1, 2, 3, 4, 5, 6, 7])
    assert len(pages) == tree.num_pages == 3
    for tokens, limit, want in (
        ([1, 2, 3, 4, 5, 6], 6, 3),
        ([1, 2, 3, 4, 5, 6], 5, 2),
        ([1, 2, 3, 4, 5], 99, 2),
        ([1, 2, 9, 4, 5, 6], 6, 1),
        ([9, 2, 3, 4], 4, 0),
        ([3, 4], 2, 0),
        ([1], 1, 0),
        ([], 0, 0),
    ):
        found, node = tree.match(tokens, limit)
        assert found == pages[:want]
        assert node.depth == want
        assert all(pool.refcount(page) == 2 for page in found)
        pool.release(found)
    assert tree.evictable == 3


def test_existing_node_keeps_its_page():
    pool, tree = make()
    first = publish(pool, tree, [1, 2, 3, 4])
    second = publish(pool, tree, [1, 2, 3, 4, 5, 6])
    assert tree.match([1, 2, 3, 4, 5, 6], 6)[0] == [*first, second[2]]
    assert pool.free == 8 - 3


def test_copy_in_use_is_not_continued():
    """Else its later pages would be held in the tree below a page that nobody holds."""
    pool, tree = make()
    first = publish(pool, tree, [1, 2])
    mine = pool.alloc(2)
    node = tree.insert([1, 2, 3, 4], mine, 4)
    assert node is tree.root
    assert (tree.num_pages, tree.evictable) == (1, 1)
    tree.insert([1, 2, 3, 4], mine, 4, node, leaving=True)
    pool.release(mine)
    assert tree.match([1, 2, 3, 4], 4)[0] == [first[0], mine[1]]


def test_growing_prefix_is_not_walked_again():
    pool, tree = make(10_001)

    class Counting(list):
        read = 0

        def __getitem__(self, at):
            self.read += 1
            return super().__getitem__(at)

    tokens = Counting(range(20_000))
    pages = pool.alloc(10_000)
    node = tree.root
    for end in range(0, 20_001, 100):
        node = tree.insert(tokens, pages, end, node)
    assert tree.num_pages == 10_000
    assert tokens.read == 10_000
    assert tree.match(list(range(20_000)), 20_000)[0] == pages


def test_evicts_least_recently_used_leaves_first():
    pool, tree = make()
    old = publish(pool, tree, [1, 1, 2, 2])
    publish(pool, tree, [3, 3])
    publish(pool, tree, [4, 4])
    pool.release(tree.match([1, 1, 2, 2], 4)[0])  # the oldest is now the newest
    assert tree.evict(1) == 1
    assert sorted(node.key for node in tree.nodes()) == [(1, 1), (2, 2), (4, 4)]
    assert tree.evict(1) == 1
    assert [node.page for node in tree.nodes()] == old
    assert tree.evict(1) == 1
    assert [node.page for node in tree.nodes()] == old[:1]  # the leaf went before its parent
    assert tree.evict(5) == 1
    assert tree.evict(1) == tree.num_pages == 0
    assert pool.free == 8


def test_held_pages_are_not_evicted():
    pool, tree = make()
    publish(pool, tree, [1, 1, 2, 2, 3, 3])
    publish(pool, tree, [5, 5])
    held, _ = tree.match([1, 1, 2, 2], 4)
    assert tree.evictable == 2
    assert tree.evict(9) == 2
    assert (tree.num_pages, tree.evictable) == (2, 0)
    pool.release(held)
    assert tree.evictable == 2
    assert tree.evict(9) == 2
    assert pool.free == 8


def test_clear_leaves_pages_to_their_other_holders():
    pool, tree = make()
    publish(pool, tree, [1, 1, 2, 2])
    held, _ = tree.match([1, 1], 2)
    assert tree.clear() == 2
    assert (tree.num_pages, tree.evictable, pool.free) == (0, 0, 7)
    assert tree.match([1, 1], 2)[0] == []
    pool.release(held)
    assert pool.free == 8
    assert tree.clear() == 0


def test_evicting_is_not_a_walk_of_the_tree():
    pool, tree = make(40_001)
    for i in range(40_000):
        publish(pool, tree, [i, i])
    start = time.perf_counter()
    for _ in range(10_000):
        tree.evict(1)
    assert time.perf_counter() - start < 1.0  # about 0.02 s; a walk per page takes minutes
    assert tree.num_pages == 30_000


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_tree_against_a_model(data):
    """After any mix of operations counts add up, and every page found holds the prefix it was found by."""
    pool, tree = make(data.draw(st.integers(4, 12)))
    total = pool.free
    prompts = st.lists(st.integers(0, 1), max_size=8)
    wrote = {}  # page -> the prefix its last holder computed
    held = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["run", "drop", "evict", "clear"]))
        if action == "run":
            tokens = data.draw(prompts)
            pages, node = tree.match(tokens, len(tokens))
            for i, page in enumerate(pages):
                assert wrote[page] == tokens[: (i + 1) * SIZE]
            missing = len(tokens) // SIZE - len(pages)
            if missing <= pool.free:
                for page in pool.alloc(missing):
                    pages.append(page)
                    wrote[page] = tokens[: len(pages) * SIZE]
                tree.insert(tokens, pages, len(tokens), node)
            held.append(pages)
        elif action == "drop" and held:
            pool.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
        elif action == "evict":
            n, could, free = data.draw(st.integers(0, 4)), tree.evictable, pool.free
            assert tree.evict(n) == min(n, could) == pool.free - free
        elif action == "clear":
            tree.clear()
        nodes = list(tree.nodes())
        used = {page for pages in held for page in pages}
        assert len(nodes) == tree.num_pages == len({node.page for node in nodes})
        assert tree.evictable == sum(node.page not in used for node in nodes)
        assert pool.free == total - len(used | {node.page for node in nodes})
        for page in range(1, total + 1):
            assert pool.refcount(page) == sum(page in pages for pages in held) + sum(n.page == page for n in nodes)


def test_a_match_ends_at_a_snapshot_and_the_least_recently_used_gives_way():
    pool = PagePool(9)
    snapshots = Snapshots([7, 8])
    tree = PrefixTree(pool, SIZE, snapshots=snapshots)
    pages = publish(pool, tree, [1, 2, 3, 4, 5, 6])
    assert tree.match([1, 2, 3, 4, 5, 6], 6) == ([], tree.root)
    first, second = (tree.find([1, 2, 3, 4, 5, 6], end) for end in (2, 4))
    assert (snapshots.give(first), snapshots.give(second)) == (7, 8)
    for tokens, deep in (([1, 2, 3, 4, 5, 6], 2), ([1, 2, 3, 9], 1)):  # the first is used last
        found, node = tree.match(tokens, len(tokens))
        assert (found, node.depth) == (pages[:deep], deep)
        pool.release(found)
    third = tree.find([1, 2, 3, 4, 5, 6], 6)
    assert snapshots.give(third) == 8 and second.snapshot is None
    assert tree.match([1, 2, 3, 4], 4)[1] is first
    pool.release(pages[:1])
    assert tree.evict(1) == 1 and snapshots.free == [8], "a page that goes takes its snapshot along"
    assert tree.clear() == 2 and sorted(snapshots.free) == [7, 8]
    assert Snapshots(()).give(first) is None


def test_with_reach_a_page_is_found_by_the_tokens_after_it_too():
    """A drafter's cache in a page may depend on the token that comes next, so pages that go on otherwise are others."""
    pool = PagePool(9)
    tree = PrefixTree(pool, SIZE, reach=1)
    pages = publish(pool, tree, [1, 2, 3, 4, 5])
    assert tree.num_pages == 2, "the token after a page must be known"
    assert publish(pool, tree, [1, 2, 3, 4]) and tree.num_pages == 2
    for tokens, limit, want in (
        ([1, 2, 3, 4, 5], 5, 2),
        ([1, 2, 3, 4, 5], 4, 2),  # the limit is of what is cached, not of what decides it
        ([1, 2, 3, 4, 5], 3, 1),
        ([1, 2, 3, 4, 6], 5, 1),
        ([1, 2, 3, 4], 4, 1),  # what comes after the second page isn't known
        ([1, 2, 9], 3, 0),
        ([1, 2], 2, 0),
    ):
        found, node = tree.match(tokens, limit)
        assert (found, node.depth) == (pages[:want], want) and tree.find(tokens, limit) is node
        pool.release(found)
    other = publish(pool, tree, [1, 2, 9, 9, 9])
    assert tree.num_pages == 4, "what goes on otherwise is another page from the first on"
    assert tree.match([1, 2, 9, 9, 9], 5)[0] == other


def test_with_snapshots_a_page_computed_again_takes_the_idle_ones_place():
    """Else nothing behind it could be published before its sequence leaves."""
    pool = PagePool(9)
    tree = PrefixTree(pool, SIZE, snapshots=Snapshots([7]))
    (old,) = publish(pool, tree, [1, 2])
    mine = pool.alloc(2)
    node = tree.insert([1, 2, 3, 4], mine, 4)
    assert (node.depth, node.page, pool.refcount(old)) == (2, mine[1], 0)
    others = pool.alloc(2)
    assert tree.insert([1, 2, 5, 6], others, 4) is tree.root, "that page is in use"


def test_pages_that_the_drafter_missed_are_for_those_that_do_without():
    pool, tree = make(20)
    text = [1, 2, 3, 4, 5, 6]
    pages = pool.alloc(3)
    tree.insert(text, pages, 6, leaving=True, drafter_seen=3)
    pool.release(pages)
    matched, node = tree.match(text, 6)
    assert (matched, node.depth, node.drafter_seen) == (pages[:1], 1, 1)
    pool.release(matched)
    matched, node = tree.match(text, 6, missed=True)
    assert (matched, node.depth, node.drafter_seen) == (pages, 3, 1)
    pool.release(matched)
    full = publish(pool, tree, text)
    assert tree.num_pages == 5 and pool.idle == 5
    for missed in (False, True):
        matched, node = tree.match(text, 6, missed=missed)
        assert (matched, node.drafter_seen) == ([pages[0], *full[1:]], 3), "pages that serve all come first"
        pool.release(matched)
    assert tree.evict(9) == 5 and pool.free == 19
