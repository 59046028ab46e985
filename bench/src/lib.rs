//! Measures what speculation brings: loads an endpoint, tells what users wait for and what became of drafts, and says what
//! follows from it. Everything behind the `spec-bench` command.

pub mod quantiles;
pub mod report;
pub mod results;
pub mod setting;
