//! The CPU backend: a team of threads and the kernels they run. The scalar kernels are the definition of every number
//! that the program computes; AVX2, AVX-512 and NEON give the same bits.

pub mod isa;
pub mod kernels;
pub mod ops;
pub mod team;

pub use isa::Isa;
pub use ops::{KvBlock, Ops, Out, Q8Rows, Rows};
pub use team::Team;
