//! GGUF files: header, tensors and the tokenizer in the metadata.
#![no_main]

use libfuzzer_sys::fuzz_target;
use spec_build::checkpoint::TokenizerSource;
use spec_build::tokenizer::GgufTokenizer;
use spec_fuzz::{file, read_checkpoint};

fuzz_target!(|input: &[u8]| {
    let Some(checkpoint) = read_checkpoint(&file("fuzz.gguf", input)) else { return };
    if let TokenizerSource::Gguf(metadata) = &checkpoint.tokenizer {
        let _ = GgufTokenizer::from(&**metadata).build();
    }
});
