//! Tegu: an LLM runtime for NVIDIA Jetson Orin boards.
//!
//! This page is the map. A token's way through the house:
//!
//! ```text
//! file on disk ─► format ─► weights ─► model ─► backend (cpu | cuda) ─► kv + sample ─► engine ─► serve | cli
//! ```
//!
//! | room | owns | may import |
//! |---|---|---|
//! | [`units`], [`limits`] | unit newtypes, the error type, every `*_MAX` | nothing |
//! | [`format`] | bytes to structs: GGUF, safetensors headers, codecs, the tile layout. Pure: no I/O, no unsafe | units, limits |
//! | [`weights`] | files to checked tensors in the tile layout; the memory plan; `ExpertSource` | format |
//! | [`model`] | hyperparameters, names bound once, layers as plain data | weights and below |
//! | [`text`] | tokenizer, chat template, streaming detokenizer, stop strings | format |
//! | [`kv`] | page ids, reference counts, block tables, the prefix tree; owns no bytes | model and below |
//! | [`backend`] | the `Backend` trait; KV bytes and scratch; `cpu`: the definition and its fast paths; `cuda` | kv and below |
//! | [`sample`] | samplers, penalties, log-probabilities | backend and below, text |
//! | [`engine`] | the step loop: sequences, batches, order, spill, sessions; `service`: its thread | sample and below, text |
//! | [`config`], [`observe`] | settings; logging and progress | units, limits |
//! | [`serve`] | sockets, HTTP, OpenAI's and Ollama's endpoints; which model is in memory | engine and below, text, config |
//! | [`power`] | a board's sensors, clocks and governor; simulated boards | units, limits, observe, config, engine |
//! | [`net`] | a blocking HTTP client for the command line | units, limits |
//! | `app` | the only place that knows every room | all but cli |
//! | `cli` | `tegu run chat serve ps stop list logits ppl bench inspect pack synth` | all |
//!
//! `app` holds the daemon's power thread (`app::keeper`), which the engine tells its phases and which gives it budgets.
//!
//! Threads: the caller's thread, or in the daemon one of `engine::service`, drives the engine, which is the sole owner of
//! sequences, KV and backend; a stream to each reader is bounded, and a slow reader is cancelled. The CPU backend adds
//! its own team of workers; loading adds readers that end with the load.
//!
//! `tests/tidy.rs` holds the import table as data and fails on any other edge. `unsafe` lives in `weights`
//! (mapping, aligned buffers) and `backend` (SIMD, the driver), each block with its SAFETY note.

#![warn(missing_docs)]

pub mod units;

pub mod limits;

pub mod format;

pub mod weights;

pub mod model;

pub mod text;

pub mod kv;

pub mod backend;

pub mod sample;

pub mod engine;

pub mod config;

pub mod observe;

pub mod power;

pub mod serve;

pub mod net;

pub mod app;

pub mod cli;
