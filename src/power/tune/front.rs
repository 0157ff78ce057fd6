//! Pareto fronts of three goals, and the volume that a front commands.

/// A point in three goals, each to be made small.
pub type Goals = [f64; 3];

/// Whether `a` is at least as good as `b` in each goal and better in one.
pub fn dominates(a: &Goals, b: &Goals) -> bool {
    a.iter().zip(b).all(|(x, y)| x <= y) && a.iter().zip(b).any(|(x, y)| x < y)
}

/// Indices of the points that no other dominates, in the order given; of equal points the first.
pub fn front(points: &[Goals]) -> Vec<usize> {
    let is_best = |i: usize| {
        let beaten = |(j, p): (usize, &Goals)| dominates(p, &points[i]) || j < i && *p == points[i];
        !points.iter().enumerate().any(beaten)
    };
    (0..points.len()).filter(|&i| is_best(i)).collect()
}

/// Volume between the points and a corner that is worse than all of them: each point commands the box up to the corner.
/// Points beyond the corner command nothing.
pub fn hypervolume(points: &[Goals], corner: &Goals) -> f64 {
    let mut inside: Vec<Goals> =
        points.iter().copied().filter(|p| p.iter().zip(corner).all(|(x, c)| x < c)).collect();
    // Slices along the third goal: within one, the points with a smaller third goal command an area.
    inside.sort_by(|a, b| a[2].total_cmp(&b[2]));
    let mut volume = 0.0;
    for (n, point) in inside.iter().enumerate() {
        let next = inside.get(n + 1).map_or(corner[2], |p| p[2]);
        if next > point[2] {
            volume += area(&inside[..=n], corner) * (next - point[2]);
        }
    }
    volume
}

/// Area that points command in the first two goals.
fn area(points: &[Goals], corner: &Goals) -> f64 {
    let mut flat: Vec<[f64; 2]> = points.iter().map(|p| [p[0], p[1]]).collect();
    flat.sort_by(|a, b| a[0].total_cmp(&b[0]));
    let (mut sum, mut height) = (0.0, corner[1]);
    for [x, y] in flat {
        if y < height {
            sum += (corner[0] - x) * (height - y);
            height = y;
        }
    }
    sum
}

#[test]
fn fronts_and_volumes_of_simple_shapes() {
    let points = [[1.0, 3.0, 1.0], [3.0, 1.0, 1.0], [2.0, 2.0, 1.0], [3.0, 3.0, 1.0], [2.0, 2.0, 1.0]];
    assert_eq!(front(&points), [0, 1, 2]);
    assert!(!dominates(&points[2], &points[4]) && dominates(&points[2], &points[3]));
    let corner = [4.0, 4.0, 2.0];
    assert_eq!(hypervolume(&[[1.0, 1.0, 1.0]], &corner), 9.0);
    // Steps of a stair: 3·1 + 2·1 + 1·1.
    assert_eq!(hypervolume(&points, &corner), 6.0);
    // What is dominated, or outside, adds nothing.
    assert_eq!(hypervolume(&[[1.0, 1.0, 1.0], [2.0, 2.0, 1.5], [0.0, 0.0, 9.0]], &corner), 9.0);
    // Two boxes that overlap: 8 + 8 - 1 (unit corner of each at 2 along the axes).
    let two = [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]];
    assert_eq!(hypervolume(&two, &[2.0, 2.0, 2.0]), 4.0 + 2.0 - 1.0);
    assert_eq!(hypervolume(&[], &corner), 0.0);
}
