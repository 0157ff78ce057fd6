//! Marker texts in a stream: what may yet become one is held back.

/// Bytes at the end of `text` that may be the start of one of `markers`: 0 if no marker can begin there.
pub(super) fn held_bytes(text: &str, markers: &[&str]) -> usize {
    let longest = markers.iter().map(|m| m.len()).max().unwrap_or(0);
    let from = text.len().saturating_sub(longest.saturating_sub(1));
    // The longest such end wins: a shorter one lies inside it.
    let starts = (from..text.len()).filter(|&i| text.is_char_boundary(i));
    let mut held = starts.filter(|&i| markers.iter().any(|m| m.starts_with(&text[i..])));
    held.next().map_or(0, |i| text.len() - i)
}

/// The first marker in `text`, the longer one where two begin at one place: `(offset, index of the marker)`.
pub(super) fn first_marker(text: &str, markers: &[&str]) -> Option<(usize, usize)> {
    let found = markers.iter().enumerate().filter_map(|(i, m)| Some((text.find(m)?, i)));
    found.min_by_key(|&(at, i)| (at, usize::MAX - markers[i].len()))
}

#[test]
fn only_what_may_become_a_marker_is_held() {
    let markers = ["<think>", "<tool_call>", "｜end｜"];
    assert_eq!(held_bytes("a <t", &markers), 2);
    assert_eq!(held_bytes("a <to", &markers), 3);
    assert_eq!(held_bytes("a <tx", &markers), 0);
    assert_eq!(held_bytes("<<", &markers), 1);
    assert_eq!(held_bytes("ab｜e", &markers), "｜e".len());
    assert_eq!(held_bytes("", &markers), 0);
    assert_eq!(first_marker("x<tool_call><think>", &markers), Some((1, 1)));
    assert_eq!(first_marker("x<to", &markers), None);
}
