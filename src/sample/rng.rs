//! xoshiro256++ (Blackman & Vigna, <https://prng.di.unimi.it>), seeded by splitmix64. Our own twenty lines, so that what a
//! seed gives never changes with a dependency.

/// The generator.
#[derive(Debug, Clone)]
pub struct Rng([u64; 4]);

impl Rng {
    /// A generator for a seed.
    pub fn new(seed: u64) -> Rng {
        let mut s = seed;
        Rng([(); 4].map(|()| {
            s = s.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (s ^ (s >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        }))
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        let s = &mut self.0;
        let out = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        out
    }

    /// Uniform in `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[test]
fn a_seed_gives_the_published_sequence() {
    // From the reference splitmix64 and xoshiro256++ run with seed 0.
    let mut r = Rng([1, 2, 3, 4]);
    assert_eq!([r.next_u64(), r.next_u64(), r.next_u64()], [41943041, 58720359, 3588806011781223]);
    assert_eq!(Rng::new(0).0[0], 0xe220_a839_7b1d_cdaf);
}
