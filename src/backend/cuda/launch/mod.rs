//! One launch wrapper for each kernel: the only places that know a kernel's name, grid and parameters. All put work on the
//! GPU's one stream and return at once.

pub mod act;
pub mod attend;
pub mod embed;
pub mod expert;
pub mod flash;
pub mod gemm;
pub mod gemv;
pub mod mla;
pub mod norm;
pub mod quantize;
pub mod rope;
pub mod router;
pub mod top;

#[cfg(test)]
mod attention_tests;
#[cfg(test)]
mod router_tests;
#[cfg(test)]
mod row_tests;
#[cfg(test)]
mod test_pages;
