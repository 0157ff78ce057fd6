//! Each filter against a naive reference; penalties against their formulas; seeds; edge values.

use super::*;

fn logits(n: usize, seed: u64) -> Vec<f32> {
    let mut r = Rng::new(seed);
    (0..n).map(|_| (r.unit() * 12.0 - 6.0) as f32).collect()
}

fn probabilities(l: &[f32]) -> Vec<f64> {
    let max = l.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let e: Vec<f64> = l.iter().map(|v| f64::from(v - max).exp()).collect();
    let sum: f64 = e.iter().sum();
    e.iter().map(|v| v / sum).collect()
}

/// Draws often and returns how often each token came.
fn histogram(params: SampleParams, l: &[f32], n: usize) -> Vec<usize> {
    let mut s = Sampler::new(params).unwrap();
    let mut seen = vec![0; l.len()];
    (0..n).for_each(|_| seen[s.sample(&mut l.to_vec()).unwrap().token as usize] += 1);
    seen
}

fn support(h: &[usize]) -> Vec<usize> {
    (0..h.len()).filter(|&i| h[i] > 0).collect()
}

fn ranked(l: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..l.len()).collect();
    order.sort_by(|&a, &b| l[b].total_cmp(&l[a]).then(a.cmp(&b)));
    order
}

#[test]
fn greedy_takes_the_first_of_the_best() {
    let mut s = Sampler::new(SampleParams::greedy()).unwrap();
    assert_eq!(s.sample(&mut [0.0, 3.0, 3.0]).unwrap().token, 1);
    assert_eq!(s.sample(&mut [f32::NAN, -1.0, f32::NEG_INFINITY]).unwrap().token, 1);
    assert!(s.sample(&mut [f32::NAN; 3]).is_err());
    assert!(s.sample(&mut []).is_err());
}

#[test]
fn draws_follow_the_distribution() {
    let l = logits(8, 3);
    let n = 40_000;
    let p = probabilities(&l);
    let h = histogram(SampleParams { temp: 1.0, seed: 5, ..Default::default() }, &l, n);
    let chi2: f64 = h.iter().zip(&p).map(|(&o, p)| (o as f64 - p * n as f64).powi(2) / (p * n as f64)).sum();
    assert!(chi2 < 24.3, "chi-square {chi2} with 7 degrees of freedom"); // the 0.1% point
}

#[test]
fn same_seed_same_tokens() {
    let l = logits(500, 1);
    let draw = |seed| {
        let mut s = Sampler::new(SampleParams { temp: 0.9, top_k: 40, seed, ..Default::default() }).unwrap();
        (0..50).map(|_| s.sample(&mut l.clone()).unwrap().token).collect::<Vec<_>>()
    };
    assert_eq!(draw(7), draw(7));
    assert_ne!(draw(7), draw(8));
}

#[test]
fn filters_keep_what_their_definitions_say() {
    let l = logits(12, 9);
    let (order, p) = (ranked(&l), probabilities(&l));
    let base = SampleParams { temp: 1.5, ..Default::default() };
    let kept = |params: SampleParams| {
        // Wide temperature and many draws: everything that is kept shows up.
        let mut k = support(&histogram(SampleParams { temp: 30.0, ..params }, &l, 20_000));
        k.sort_unstable();
        k
    };
    let sorted = |mut v: Vec<usize>| {
        v.sort_unstable();
        v
    };
    assert_eq!(kept(SampleParams { top_k: 5, ..base.clone() }), sorted(order[..5].to_vec()));
    let mut sum = 0.0;
    let n = order
        .iter()
        .take_while(|&&i| {
            let before = sum;
            sum += p[i];
            before < 0.8
        })
        .count();
    assert_eq!(kept(SampleParams { top_p: 0.8, ..base.clone() }), sorted(order[..n].to_vec()));
    let floor = 0.1 * p[order[0]];
    let want = order.iter().copied().filter(|&i| p[i] >= floor).collect();
    assert_eq!(kept(SampleParams { min_p: 0.1, ..base.clone() }), sorted(want));
    let mean = l.iter().sum::<f32>() / 12.0;
    let sigma = (l.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / 12.0).sqrt();
    let want = order.iter().copied().filter(|&i| l[i] >= l[order[0]] - sigma).collect();
    assert_eq!(kept(SampleParams { top_n_sigma: 1.0, ..base.clone() }), sorted(want));
    let entropy: f64 = p.iter().map(|p| -p * p.ln()).sum();
    let mut near = order.clone();
    near.sort_by(|&a, &b| (-p[a].ln() - entropy).abs().total_cmp(&(-p[b].ln() - entropy).abs()));
    let mut sum = 0.0;
    let n = near
        .iter()
        .take_while(|&&i| {
            let before = sum;
            sum += p[i];
            before <= 0.5
        })
        .count();
    assert_eq!(kept(SampleParams { typical: 0.5, ..base.clone() }), sorted(near[..n].to_vec()));
}

#[test]
fn xtc_spares_the_least_of_the_likely() {
    let l = [2.0, 1.9, 1.8, -3.0];
    let always = SampleParams { temp: 1.0, xtc_probability: 1.0, xtc_threshold: 0.2, ..Default::default() };
    assert_eq!(support(&histogram(always.clone(), &l, 5000)), [2, 3]);
    let half = SampleParams { xtc_probability: 0.5, ..always };
    assert_eq!(support(&histogram(half, &l, 5000)), [0, 1, 2, 3]);
}

#[test]
fn penalties_follow_their_formulas() {
    let params = SampleParams {
        repeat_penalty: 2.0,
        frequency_penalty: 0.25,
        presence_penalty: 0.5,
        repeat_last_n: Some(3),
        ..Default::default()
    };
    let mut h = History::new(&params);
    [9, 0, 1, 1].into_iter().for_each(|t| h.push(t));
    let mut l = vec![4.0, -4.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 7.0];
    h.penalize(&params, &mut l);
    assert_eq!(&l[..3], [4.0 / 2.0 - 0.25 - 0.5, -4.0 * 2.0 - 0.5 - 0.5, 1.0]);
    assert_eq!(l[9], 7.0, "out of the window");
}

#[test]
fn dry_equals_the_quadratic_definition() {
    let params = SampleParams {
        dry_multiplier: 0.8,
        dry_base: 1.5,
        dry_breakers: vec![vec![3]],
        ..Default::default()
    };
    let mut r = Rng::new(11);
    for len in [1, 2, 5, 40, 200] {
        let text: Vec<u32> = (0..len).map(|_| (r.next_u64() % 4) as u32).collect();
        let mut h = History::new(&params);
        text.iter().for_each(|&t| h.push(t));
        let mut got = vec![0.0; 4];
        h.penalize(&params, &mut got);
        let mut want = [0usize; 4];
        for end in 0..text.len() - 1 {
            // A passage that ends at `end` and equals the text's end.
            let same = |n: usize| text[end - n] == text[len - 1 - n] && text[end - n] != 3;
            let n = (0..=end).take_while(|&n| same(n)).count();
            let next = text[end + 1] as usize;
            want[next] = want[next].max(n);
        }
        for t in 0..4 {
            let cost =
                if t != 3 && want[t] >= 2 { 0.8 * 1.5f32.powi(want[t].min(202) as i32 - 2) } else { 0.0 };
            assert!(
                (got[t] + cost).abs() <= 1e-6 * cost.max(1.0),
                "length {len}, token {t}: {} {cost}",
                got[t]
            );
        }
    }
}

#[test]
fn bias_and_logprobs() {
    let params = SampleParams {
        logit_bias: vec![(0, 5.0), (2, f32::NEG_INFINITY)],
        logprobs: Some(2),
        ..Default::default()
    };
    let mut s = Sampler::new(params).unwrap();
    let l = [1.0, 2.0, 3.0];
    let got = s.sample(&mut l.to_vec()).unwrap();
    let p = probabilities(&l);
    assert_eq!(got.token, 0);
    assert!((f64::from(got.logprob) - p[0].ln()).abs() < 1e-6);
    assert_eq!(got.top.iter().map(|t| t.0).collect::<Vec<_>>(), [2, 1]);
    assert!((f64::from(got.top[0].1) - p[2].ln()).abs() < 1e-6);
}

#[test]
fn nonsense_is_refused_by_name() {
    for (params, field) in [
        (SampleParams { temp: f32::NAN, ..Default::default() }, "temperature"),
        (SampleParams { temp: -1.0, ..Default::default() }, "temperature"),
        (SampleParams { top_p: 1.5, ..Default::default() }, "top_p"),
        (SampleParams { min_p: -0.1, ..Default::default() }, "min_p"),
        (SampleParams { repeat_penalty: 0.0, ..Default::default() }, "repeat_penalty"),
        (SampleParams { logit_bias: vec![(3, f32::NAN)], ..Default::default() }, "logit_bias[3]"),
    ] {
        let e = Sampler::new(params).unwrap_err().to_string();
        assert!(e.contains(field), "{e}");
    }
}

#[test]
fn dry_breakers_may_be_several_tokens() {
    let cost = |breakers: Vec<Vec<u32>>, text: &[u32]| {
        let params =
            SampleParams { dry_multiplier: 1.0, dry_base: 2.0, dry_breakers: breakers, ..Default::default() };
        let mut h = History::new(&params);
        text.iter().for_each(|&t| h.push(t));
        let mut l = vec![0.0; 10];
        h.penalize(&params, &mut l);
        l.into_iter().map(|l| -l).collect::<Vec<_>>()
    };
    let text = [1, 2, 3, 4, 5, 1, 2, 3, 4];
    // "1 2 3 4" again: 5 comes next, length 4, so 2^(4 - 2).
    assert_eq!(cost(vec![], &text)[5], 4.0);
    // Over "2 3" nothing reaches: only "4" repeats, which is free.
    assert_eq!(cost(vec![vec![2, 3]], &text)[5], 0.0);
    // "1 2" is behind "3 4": length 2.
    assert_eq!(cost(vec![vec![1, 2]], &text)[5], 1.0);
    // One that is not in the text changes nothing; one that is what comes next makes that free.
    assert_eq!(cost(vec![vec![2, 4], vec![4, 4, 4]], &text)[5], 4.0);
    assert_eq!(cost(vec![vec![5]], &text)[5], 0.0);
}

/// A vocabulary large enough that selection comes in several rounds: each filter's survivors against sorting everything.
#[test]
fn large_vocabularies_are_filtered_as_small_ones() {
    let l: Vec<f32> = logits(20_000, 4).iter().map(|l| (l * 4.0).round() / 8.0).collect(); // many ties
    let (order, p) = (ranked(&l), probabilities(&l));
    let ids = |c: &filter::Candidates| c.list().iter().map(|c| c.id as usize).collect::<Vec<_>>();
    let all = || {
        let mut c = filter::Candidates::default();
        c.collect(&l, -1.0);
        c
    };
    for k in [1, 100, 19_999] {
        let mut c = all();
        c.top_k(k);
        assert_eq!(ids(&c), order[..k]);
    }
    for top_p in [0.0, 0.01, 0.3, 0.99, 0.9999] {
        let mut c = all();
        c.top_p(top_p);
        let mut sum = 0.0;
        let n = order
            .iter()
            .take_while(|&&i| {
                let before = sum;
                sum += p[i];
                before < f64::from(top_p)
            })
            .count();
        let got = ids(&c);
        // Float sums may differ in the last candidate.
        assert!(got.len().abs_diff(n.max(1)) <= 1, "{top_p}: {} {n}", got.len());
        assert_eq!(got, order[..got.len()]);
        let len = got.len();
        c.min_p(0.5);
        let floor = l[order[0]] + 0.5f32.ln();
        assert_eq!(ids(&c), order[..len].iter().copied().filter(|&i| l[i] >= floor).collect::<Vec<_>>());
    }
    let entropy: f64 = p.iter().map(|p| -p * p.ln()).sum();
    let mut c = all();
    c.typical(0.6);
    let farthest = ids(&c).iter().map(|&i| (-p[i].ln() - entropy).abs()).fold(0.0, f64::max);
    let kept: f64 = ids(&c).iter().map(|&i| p[i]).sum();
    assert!((0.6..0.6 + 2.0 * p[order[0]] + 1e-6).contains(&kept), "{kept}");
    let nearer = (0..l.len()).filter(|&i| (-p[i].ln() - entropy).abs() < farthest - 1e-4).count();
    assert!(nearer <= c.list().len(), "nothing nearer was left out");
    let mut c = all();
    c.xtc(1.0, 0.0, &mut Rng::new(1));
    assert_eq!(ids(&c), [*order.last().unwrap()], "threshold 0: all are likely, the least likely stays");
}

#[test]
fn edge_values_turn_filters_off() {
    let l = logits(50, 2);
    let off = SampleParams { temp: 1.0, seed: 3, ..Default::default() };
    let explicit =
        SampleParams { top_k: 50, top_p: 1.0, min_p: 0.0, typical: 1.0, top_n_sigma: 0.0, ..off.clone() };
    assert_eq!(histogram(off.clone(), &l, 500), histogram(explicit, &l, 500));
    // The strictest values leave the best one.
    let best = ranked(&l)[0];
    for p in [
        SampleParams { top_k: 1, ..off.clone() },
        SampleParams { top_p: 0.0, ..off.clone() },
        SampleParams { min_p: 1.0, ..off.clone() },
        SampleParams { top_n_sigma: 1e-6, ..off.clone() },
        SampleParams { temp: 1e-4, ..off.clone() },
    ] {
        assert_eq!(support(&histogram(p, &l, 200)), [best]);
    }
    let mut s = Sampler::new(SampleParams { logit_bias: vec![(50, 1.0)], ..off }).unwrap();
    let e = s.sample(&mut l.clone()).unwrap_err().to_string();
    assert_eq!(e, "sampling: logit_bias: expected a token id below 50, found 50");
}

/// The text that a seed gives is a promise: these tokens may only change with a line in the change log.
#[test]
fn a_seed_keeps_its_tokens() {
    let l = logits(1000, 21);
    let draw = |p: SampleParams| {
        let mut s = Sampler::new(SampleParams { temp: 0.8, seed: 42, ..p }).unwrap();
        (0..6).map(|_| s.sample(&mut l.clone()).unwrap().token).collect::<Vec<_>>()
    };
    assert_eq!(draw(SampleParams::default()), [838, 310, 975, 686, 798, 605]);
    let filtered = SampleParams { top_k: 40, top_p: 0.9, min_p: 0.05, ..Default::default() };
    assert_eq!(draw(filtered), [899, 577, 367, 234, 848, 505]);
}
