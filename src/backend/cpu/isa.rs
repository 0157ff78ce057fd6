//! Which instruction set the kernels use: found once at start, the same bits from each.

/// An instruction set that has kernels. [`Isa::available`] lists those that this machine runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust: the definition, and the fallback.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C (2013 on).
    Avx2,
    /// x86-64 with AVX-512 F, BW, VL, DQ and VNNI (2019 on).
    Avx512Vnni,
    /// aarch64 with the dot product extension (Orin's Cortex-A78AE has it).
    NeonDot,
}

impl Isa {
    /// All of them, slowest first.
    pub const ALL: [Isa; 4] = [Isa::Scalar, Isa::Avx2, Isa::Avx512Vnni, Isa::NeonDot];

    /// True if this machine can run it.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => {
                Isa::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot => std::arch::is_aarch64_feature_detected!("dotprod"),
            #[allow(unreachable_patterns)] // which are missing depends on the architecture
            _ => false,
        }
    }

    /// Those that this machine runs, slowest first.
    pub fn available() -> Vec<Isa> {
        Isa::ALL.into_iter().filter(|i| i.is_available()).collect()
    }

    /// The fastest that this machine runs.
    pub fn best() -> Isa {
        Isa::ALL.into_iter().rfind(|i| i.is_available()).unwrap_or(Isa::Scalar)
    }

    /// The name users write: `scalar`, `avx2`, `avx512`, `neon`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512Vnni => "avx512",
            Isa::NeonDot => "neon",
        }
    }

    /// Finds one by its name; `None` if there is no such name (it may still not be available).
    pub fn from_name(name: &str) -> Option<Isa> {
        Isa::ALL.into_iter().find(|i| i.name().eq_ignore_ascii_case(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalar_is_always_there_and_best_is_available() {
        assert_eq!(Isa::available()[0], Isa::Scalar);
        assert!(Isa::best().is_available());
        for isa in Isa::ALL {
            assert_eq!(Isa::from_name(isa.name()), Some(isa));
        }
    }
}
