//! "Did you mean": the nearest known name.

/// The known name nearest to `name`, if it is near enough to be what was meant: at most a third of its letters away,
/// or one that begins or ends the other.
pub fn nearest<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    let scored = known.iter().map(|k| (distance(name, k), *k));
    let (best, near) = scored.min_by_key(|(d, _)| *d)?;
    if best <= 1 + near.chars().count() / 3 {
        return Some(near);
    }
    known.iter().copied().find(|k| name.starts_with(k) || k.starts_with(name) && !name.is_empty())
}

/// Letters to insert, drop, change or swap with a neighbour to turn `a` into `b` (optimal string alignment).
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().take(64).collect(), b.chars().collect());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for (i, row) in rows.iter_mut().enumerate() {
        row[0] = i;
    }
    rows[0] = (0..=b.len()).collect();
    for i in 1..=a.len() {
        for j in 1..=b.len() {
            let change = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            rows[i][j] = change.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                rows[i][j] = rows[i][j].min(rows[i - 2][j - 2] + 1);
            }
        }
    }
    rows[a.len()][b.len()]
}

#[test]
fn near_names_are_found_and_far_ones_are_not() {
    assert_eq!((distance("threads", "thraeds"), distance("abc", "yabd"), distance("", "ab")), (1, 2, 2));
    let known = ["model", "threads", "sample.temp", "sample.top_k"];
    assert_eq!(nearest("thread", &known), Some("threads"));
    assert_eq!(nearest("sample.temperature", &known), Some("sample.temp"));
    assert_eq!(nearest("colour", &known), None);
}
