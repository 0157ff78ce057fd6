use super::*;
use crate::kv::PAGE_TOKENS;

const B: usize = PAGE_TOKENS;

fn text(seed: u32, n: usize) -> Vec<TokenId> {
    (0..n as u32).map(|i| (i * 31 + seed * 977) % 5000).collect()
}

/// Inserts a text as a sequence would, and lets go of its pages.
fn add(tree: &mut Tree, pool: &mut PagePool, tokens: &[TokenId], tag: u8) -> usize {
    let pages: Vec<_> = (0..tokens.len().div_ceil(B)).map(|_| pool.take().unwrap()).collect();
    let (found, _) = tree.insert(pool, tokens, &vec![tag; tokens.len()], &pages, true);
    pages.into_iter().for_each(|p| pool.release(p));
    found.tokens
}

#[test]
fn the_longest_prefix_is_found() {
    let (mut tree, mut pool) = (Tree::new(B), PagePool::new(64));
    let a = text(1, 3 * B + 10);
    assert_eq!(add(&mut tree, &mut pool, &a, 0), a.len());
    assert_eq!(pool.used_pages(), 4);
    assert_eq!(tree.find(&a, None).tokens, a.len());
    let longer: Vec<_> = a.iter().copied().chain(text(2, 50)).collect();
    assert_eq!(tree.find(&longer, None).tokens, a.len());
    assert_eq!(tree.find(&a[..B + 7], None).tokens, B + 7);
    let mut other = a.clone();
    other[2 * B + 3] += 1;
    assert_eq!(tree.find(&other, None).tokens, 2 * B + 3);
    assert_eq!(tree.find(&text(9, 10), None), Found::default());
    // A branch in the middle of a block shares the blocks before it.
    assert_eq!(add(&mut tree, &mut pool, &other, 0), other.len());
    assert_eq!(pool.used_pages(), 6);
    assert_eq!(tree.find(&a, None).tokens, a.len());
    assert_eq!(tree.find(&other, None).tokens, other.len());
}

#[test]
fn a_leaf_that_grows_replaces_itself() {
    let (mut tree, mut pool) = (Tree::new(B), PagePool::new(64));
    let a = text(1, 2 * B);
    add(&mut tree, &mut pool, &a[..B + 3], 0);
    add(&mut tree, &mut pool, &a[..B + 9], 0);
    assert_eq!(pool.used_pages(), 2);
    add(&mut tree, &mut pool, &a, 0);
    assert_eq!((pool.used_pages(), tree.blocks()), (2, (2, 0)));
    // The shorter again adds nothing.
    assert_eq!(add(&mut tree, &mut pool, &a[..B + 3], 0), B + 3);
    assert_eq!(pool.used_pages(), 2);
}

#[test]
fn tags_keep_computations_apart() {
    let (mut tree, mut pool) = (Tree::new(B), PagePool::new(64));
    let a = text(1, 3 * B);
    add(&mut tree, &mut pool, &a, 1);
    assert_eq!(add(&mut tree, &mut pool, &a, 0), 0, "the other computation stays");
    assert_eq!(pool.used_pages(), 3);
    let mut tags = vec![1; 3 * B];
    assert_eq!(tree.find(&a, Some(&tags)).tokens, 3 * B);
    tags[B + 5..].fill(0);
    assert_eq!(tree.find(&a, Some(&tags)).tokens, B + 5);
    assert_eq!(tree.find(&a, Some(&tags[..B])).tokens, B);
}

#[test]
fn the_coldest_leaf_goes_first_and_used_blocks_stay() {
    let (mut tree, mut pool) = (Tree::new(B), PagePool::new(64));
    let (a, b) = (text(1, 2 * B), text(2, 2 * B));
    add(&mut tree, &mut pool, &a, 0);
    add(&mut tree, &mut pool, &b, 0);
    let used = tree.find(&a, None);
    let Place::Pages(pages) = tree.place(used.nodes[1]).clone() else { panic!() };
    pool.share(pages[0]); // a sequence uses a's second block, and so its whole path in earnest
    let Place::Pages(first) = tree.place(used.nodes[0]).clone() else { panic!() };
    pool.share(first[0]);
    assert_eq!(tree.evictable_pages(&pool), 2);
    let mut gone = vec![];
    while let Some((id, keep)) = tree.coldest(&pool) {
        assert!(!keep);
        tree.remove(&mut pool, id, &mut gone);
    }
    assert_eq!((tree.find(&b, None).tokens, tree.find(&a, None).tokens), (0, 2 * B));
    assert_eq!((pool.used_pages(), gone.len()), (2, 0));
}

#[test]
fn blocks_move_to_slots_and_back() {
    let (mut tree, mut pool) = (Tree::new(B), PagePool::new(8));
    let a = text(1, 2 * B + 4);
    add(&mut tree, &mut pool, &a, 0);
    let path = tree.find(&a, None);
    tree.keep(&path.nodes);
    for slot in 0..3 {
        let (id, keep) = tree.coldest(&pool).unwrap();
        assert!(keep);
        assert_eq!(id, path.nodes[2 - slot], "from the leaf up");
        tree.spilled(&mut pool, id, slot as SlotId);
    }
    assert_eq!((pool.used_pages(), tree.blocks(), tree.coldest(&pool)), (0, (0, 3), None));
    assert_eq!(tree.find(&a, None), path);
    let page = pool.take().unwrap();
    assert_eq!(tree.fetched(path.nodes[0], vec![page]), 2);
    // A sequence that computed it again brings the rest back too.
    let pages: Vec<_> = (0..3).map(|_| pool.take().unwrap()).collect();
    let (found, mut slots) = tree.insert(&mut pool, &a, &vec![0; a.len()], &pages, true);
    slots.sort();
    assert_eq!((found.tokens, slots), (a.len(), vec![0, 1]));
    pages.into_iter().for_each(|p| pool.release(p));
    assert_eq!(pool.used_pages(), 3);
    let mut slots = vec![];
    tree.remove(&mut pool, path.nodes[0], &mut slots);
    assert_eq!((pool.used_pages(), tree.blocks()), (0, (0, 0)));
}

proptest::proptest! {
    /// Against the definition: the longest common prefix with any text that was added.
    #[test]
    fn find_agrees_with_a_list_of_texts(
        texts in proptest::collection::vec(proptest::collection::vec(0u32..3, 1..(3 * B)), 1..12),
        probe in proptest::collection::vec(0u32..3, 1..(3 * B)),
    ) {
        let (mut tree, mut pool) = (Tree::new(B), PagePool::new(64));
        for t in &texts {
            add(&mut tree, &mut pool, t, 0);
        }
        for t in texts.iter().chain([&probe]) {
            let want = texts.iter().map(|u| common(t, u)).max().unwrap();
            proptest::prop_assert_eq!(tree.find(t, None).tokens, want);
        }
        while let Some((id, _)) = tree.coldest(&pool) {
            tree.remove(&mut pool, id, &mut vec![]);
        }
        proptest::prop_assert_eq!(pool.used_pages(), 0);
    }
}
