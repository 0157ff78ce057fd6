//! Layers as plain data.
