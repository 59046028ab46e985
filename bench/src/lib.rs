//! Measures what speculation brings: loads an endpoint, tells what users wait for and what became of drafts, and says what
//! follows from it. Everything behind the `spec-bench` command.

pub mod advice;
pub mod answer;
pub mod cli;
pub mod endpoint;
mod load;
pub mod machine;
pub mod measure;
pub mod prompts;
pub mod quantiles;
pub mod report;
pub mod results;
pub mod setting;
pub mod terminal;
