//! The one integration test binary: every file under `tests/` is a module here, so that there is one link.

mod cli;
mod corrupt;
mod cuda;
mod cuda_sessions;
mod engine;
mod fake_gpu;
mod golden;
mod http;
mod kernels;
mod pack;
mod power;
mod power_study;
mod saving;
mod sequences;
mod service;
mod support;
mod tidy;
mod tiny;
