//! What unmeasured settings would give: a Gaussian process over the logarithms of the clocks and the batch.
//!
//! Speed and power are smooth in these (powers and sums of powers), so that a few dozen runs tell hundreds of settings.

/// A setting as the process sees it: logarithms of GPU clock, memory clock and batch.
pub type Place = [f64; 3];

/// Distances, in logarithms, over which a goal changes its course.
const REACH: Place = [0.8, 1.2, 1.2];
/// Deviation of one measurement, in logarithms: meters carry some 3%.
const NOISE: f64 = 0.03;

/// A process that has seen some runs.
#[derive(Debug)]
pub struct Surrogate {
    places: Vec<Place>,
    /// Lower triangle of the Cholesky factor of the covariance, row by row.
    factor: Vec<Vec<f64>>,
    /// Weights of the runs, by goal.
    weights: [Vec<f64>; 3],
    mean: [f64; 3],
    /// Variance of each goal over the runs.
    scale: [f64; 3],
}

fn covariance(a: &Place, b: &Place) -> f64 {
    let square: f64 = (0..3).map(|d| ((a[d] - b[d]) / REACH[d]).powi(2)).sum();
    (-0.5 * square).exp()
}

impl Surrogate {
    /// Learns from runs: places, and the logarithms of their goals.
    pub fn new(places: &[Place], goals: &[[f64; 3]]) -> Surrogate {
        assert_eq!(places.len(), goals.len());
        assert!(!places.is_empty(), "a process learns from something");
        let n = places.len();
        let of = |g: usize| goals.iter().map(move |v| v[g]);
        let mean: [f64; 3] = std::array::from_fn(|g| of(g).sum::<f64>() / n as f64);
        let spread = |g: usize| of(g).map(|v| (v - mean[g]).powi(2)).sum::<f64>() / n as f64;
        let scale: [f64; 3] = std::array::from_fn(|g| spread(g).max(1e-6));
        // One covariance serves all goals: noise is taken relative to the goal that moves most.
        let noise = NOISE * NOISE / scale.iter().fold(1e-6, |a: f64, &b| a.max(b));
        let factor = cholesky(places, noise.max(1e-6));
        let weights = std::array::from_fn(|g| {
            let values: Vec<f64> = of(g).map(|v| v - mean[g]).collect();
            solve_upper(&factor, &solve_lower(&factor, &values))
        });
        Surrogate { places: places.to_vec(), factor, weights, mean, scale }
    }

    /// Mean and deviation of each goal at a place, in logarithms.
    pub fn predict(&self, place: &Place) -> ([f64; 3], [f64; 3]) {
        let near: Vec<f64> = self.places.iter().map(|p| covariance(p, place)).collect();
        let known: f64 = solve_lower(&self.factor, &near).iter().map(|x| x * x).sum();
        let open = (1.0 - known).max(0.0);
        let dot = |w: &[f64]| w.iter().zip(&near).map(|(a, b)| a * b).sum::<f64>();
        let mean = std::array::from_fn(|g| self.mean[g] + dot(&self.weights[g]));
        let deviation = std::array::from_fn(|g| (open * self.scale[g]).sqrt());
        (mean, deviation)
    }
}

/// Cholesky factor of the covariance of places, with noise on its diagonal.
fn cholesky(places: &[Place], noise: f64) -> Vec<Vec<f64>> {
    let mut rows: Vec<Vec<f64>> = Vec::with_capacity(places.len());
    for (i, place) in places.iter().enumerate() {
        let mut row = Vec::with_capacity(i + 1);
        for j in 0..=i {
            let other: &[f64] = if j == i { &row } else { &rows[j] };
            let dot: f64 = row.iter().zip(other).take(j).map(|(a, b)| a * b).sum();
            let raw = covariance(place, &places[j]) - dot;
            // The noise keeps the diagonal above zero, rounding included.
            let value = if j == i { (raw + noise).max(1e-12).sqrt() } else { raw / rows[j][j] };
            row.push(value);
        }
        rows.push(row);
    }
    rows
}

/// Solves `factor · x = b`.
fn solve_lower(factor: &[Vec<f64>], b: &[f64]) -> Vec<f64> {
    let mut x = Vec::with_capacity(b.len());
    for (row, value) in factor.iter().zip(b) {
        let dot: f64 = row.iter().zip(&x).map(|(a, b)| a * b).sum();
        x.push((value - dot) / row[x.len()]);
    }
    x
}

/// Solves `factorᵀ · x = b`.
fn solve_upper(factor: &[Vec<f64>], b: &[f64]) -> Vec<f64> {
    let n = b.len();
    let mut x = b.to_vec();
    for i in (0..n).rev() {
        for j in i + 1..n {
            x[i] -= factor[j][i] * x[j];
        }
        x[i] /= factor[i][i];
    }
    x
}

#[test]
fn a_smooth_law_is_learned_from_a_few_points() {
    // A roofline with a soft knee, as decode has it.
    let law = |p: &Place| {
        let (f, e) = (p[0].exp(), p[1].exp());
        [((20.0 / f).powi(2) + (30.0 / e).powi(2)).sqrt().ln(), (3.0 + f + 0.5 * e).ln(), p[2] * 0.5]
    };
    let place = |i: usize, j: usize, k: usize| {
        [(0.3 + 0.1 * i as f64).ln(), (0.2 + j as f64).ln(), (k as f64 * 2.0 + 1.0).ln()]
    };
    let mut places = Vec::new();
    for i in [0, 3, 7] {
        for j in 0..4 {
            for k in [0, 2] {
                places.push(place(i, j, k));
            }
        }
    }
    let goals: Vec<[f64; 3]> = places.iter().map(law).collect();
    let process = Surrogate::new(&places, &goals);
    for i in 0..8 {
        let p = place(i, i % 4, 1);
        let (mean, deviation) = process.predict(&p);
        for (g, (mean, law)) in mean.iter().zip(law(&p)).enumerate() {
            assert!((mean - law).abs() < 0.15, "{i} {g}: {mean} {law}");
        }
        assert!(deviation.iter().all(|d| d.is_finite()));
    }
    // Far away nothing is known.
    let (_, far) = process.predict(&[9.0, 9.0, 9.0]);
    let (_, near) = process.predict(&places[0]);
    assert!(far[0] > 5.0 * near[0]);
}
