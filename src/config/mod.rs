//! Room to be filled.
