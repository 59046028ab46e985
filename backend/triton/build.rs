//! Lists the C functions that `triton.h` declares, so that all that a host lacks can be named at once. With the
//! feature `bindgen` (used by scripts/bindings alone) it also makes the bindings.

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

const HEADER: &str = "triton.h";

fn main() {
    println!("cargo::rerun-if-changed={HEADER}");
    let header = fs::read_to_string(HEADER).expect("triton.h stands beside build.rs");
    let out = env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    let mut list = String::from("&[");
    for name in functions(&header) {
        // Writing to a string cannot fail.
        let _ = write!(list, "{name:?}, ");
    }
    list.push(']');
    fs::write(Path::new(&out).join("functions.rs"), list).expect("OUT_DIR can be written");
    #[cfg(feature = "bindgen")]
    bindings(&functions(&header), &out);
}

/// Names in front of an opening parenthesis.
fn functions(header: &str) -> Vec<&str> {
    let mut names = Vec::new();
    for (at, _) in header.match_indices('(') {
        let name = header[..at].rsplit(|c: char| !c.is_alphanumeric() && c != '_').next();
        names.extend(name.filter(|name| name.starts_with("TRITON")));
    }
    names
}

/// From the official headers where TRITON_INCLUDE_DIR names their folder, else from ours.
#[cfg(feature = "bindgen")]
fn bindings(functions: &[&str], out: &str) {
    println!("cargo::rerun-if-env-changed=TRITON_INCLUDE_DIR");
    let header = match env::var("TRITON_INCLUDE_DIR") {
        Ok(folder) => format!("{folder}/triton/core/tritonbackend.h"),
        Err(_) => HEADER.to_string(),
    };
    bindgen::builder()
        .header(header)
        .allowlist_function(functions.join("|"))
        .allowlist_type("TRITON.*|tritonserver.*")
        .dynamic_library_name("Functions")
        .dynamic_link_require_all(true)
        .layout_tests(false)
        .generate_comments(false)
        .prepend_enum_name(false)
        .generate()
        .expect("the header is valid C")
        .write_to_file(Path::new(out).join("bindings.rs"))
        .expect("OUT_DIR can be written");
}
