//! Configurations as Triton gives them.
