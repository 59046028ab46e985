//! The `spec-build` command.

use anyhow::Result;
use spec_build::cli::{Cli, Command};
use spec_build::{check, collect, draft, export, folder, generate, inspect, plan, profile};
use std::process::ExitCode;

fn main() -> ExitCode {
    match run(Cli::from_args(std::env::args_os()).command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("spec-build: {}", one_line(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Build(args) => folder::build(&args),
        Command::Try(args) => generate::generate(&args),
        Command::Draft(args) => draft::draft(&args),
        Command::Collect(args) => collect::collect(&args),
        Command::Export { gguf, output } => export::export(&gguf, &output, |source, dir| {
            folder::write_tokenizer(source, dir).map(drop)
        }),
        Command::Inspect { engine, json } => inspect::inspect(&engine, json),
        Command::Verify { engine } => check::verify(&engine),
        Command::Plan(args) => plan::plan(&args),
        Command::Profile(args) => profile::profile(&args),
    }
}

/// Names from hostile files may hold anything: an error is one line that cannot steer a terminal.
fn one_line(text: &str) -> String {
    let escape = |c: char| match c.is_control() {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    text.chars().map(escape).collect()
}
