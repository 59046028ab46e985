//! The `spec-bench` command.
fn main() {}
