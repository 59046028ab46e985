//! Generates text: `cargo run --release -p spec-core --example generate -- model_repository/NAME "Once upon a time"`,
//! with a folder that spec-build has written.

use spec_core::runtime::{ModelFolder, Options, Request, Runtime, TextRules, TextStream};
use std::error::Error;
use std::io::Write;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(folder), Some(prompt)) = (args.next(), args.next()) else {
        eprintln!("usage: generate FOLDER PROMPT");
        std::process::exit(2);
    };
    let ModelFolder { target, tokenizer, .. } = ModelFolder::open(Path::new(&folder))?;
    let mut runtime = Runtime::load(&target, &Options::default())?;
    let prompt = tokenizer.encode_prompt(&prompt)?.into();
    runtime.add(Request { prompt, max_tokens: 100, ..Request::default() })?;

    let mut text = TextStream::new(&TextRules::default());
    while !runtime.is_idle() {
        let step = runtime.step();
        for emitted in step.events.into_iter().flat_map(|event| event.emitted) {
            print!("{}", text.push(&tokenizer, emitted.token)?.text);
            std::io::stdout().flush()?;
        }
        if let Some(error) = step.failure {
            return Err(error.into());
        }
    }
    println!("{}", text.finish().text);
    Ok(())
}
