//! The `spec-build` command.

use anyhow::Result;
use spec_build::cli::{Cli, Command};
use spec_build::{export, folder, generate};
use std::process::ExitCode;

fn main() -> ExitCode {
    match run(Cli::from_args(std::env::args_os()).command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("spec-build: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Build(args) => folder::build(&args),
        Command::Try(args) => generate::generate(&args),
        Command::Export { gguf, output } => export::export(&gguf, &output, |source, dir| {
            folder::write_tokenizer(source, dir).map(drop)
        }),
        Command::Inspect { .. } | Command::Verify { .. } | Command::Plan(_) => Ok(()),
    }
}
