//! Files that change after they were opened: each change is an error with both values, in whatever stage it is met.

use super::*;
use std::os::unix::fs::FileExt;
use std::time::{Duration, SystemTime};

const AGAIN: &str = ": load the model again";

/// An engine of some age, opened: a change is then seen by its time, however coarse the clock of the file system is.
fn opened() -> (TempDir, PathBuf, Engine) {
    let (folder, path) = tiny_engine();
    writable(&path).set_modified(SystemTime::UNIX_EPOCH + Duration::new(1_000_000, 5)).unwrap();
    let engine = Engine::open(&path).unwrap();
    (folder, path, engine)
}

fn writable(path: &Path) -> fs::File {
    fs::OpenOptions::new().write(true).open(path).unwrap()
}

/// What is said about a file that is not what was opened, without the path in front and the remedy behind.
fn changed(path: &Path, result: crate::Result<()>) -> String {
    let error = result.unwrap_err().to_string();
    let start = format!("engine {}: has changed since it was opened: ", path.display());
    let what = error.strip_prefix(&start).and_then(|rest| rest.strip_suffix(AGAIN));
    what.unwrap_or_else(|| panic!("{error}")).to_string()
}

fn reopened(engine: &Engine) -> crate::Result<()> {
    engine.reader().map(drop)
}

#[test]
fn a_file_that_was_cut_off_is_refused_with_both_lengths() {
    let (_folder, path, engine) = opened();
    let len = fs::metadata(&path).unwrap().len();
    for left in [len - 1, 300, 20, 0] {
        writable(&path).set_len(left).unwrap();
        let expected = format!("it has {left} bytes and had {len}");
        assert_eq!(changed(&path, reopened(&engine)), expected);
        assert_eq!(changed(&path, engine.verify_hashes(|_| ())), expected);
    }
}

#[test]
fn a_file_that_was_written_to_is_refused_with_both_times() {
    let (_folder, path, engine) = opened();
    let embed = engine.section("embed").offset;
    writable(&path).write_all_at(b"other", embed).unwrap();
    let what = changed(&path, reopened(&engine));
    assert!(what.starts_with("it was written to at "), "{what}");
    assert!(what.ends_with(", before at 1000000.000000005"), "{what}");
}

#[test]
fn another_engine_in_its_place_is_refused() {
    let (_folder, path, engine) = opened();
    seal(&path, tiny_manifest(), 1).commit().unwrap();
    assert_eq!(changed(&path, reopened(&engine)), "its header is another one");
    fs::remove_file(&path).unwrap();
    let error = reopened(&engine).unwrap_err().to_string();
    assert!(error.contains("target.engine: No such file"), "{error}");
}

#[test]
fn a_copy_that_keeps_its_time_is_the_same_file() {
    let (folder, path, engine) = opened();
    let copy = folder.path().join("copy");
    fs::copy(&path, &copy).unwrap();
    let modified = fs::metadata(&path).unwrap().modified().unwrap();
    writable(&copy).set_modified(modified).unwrap();
    fs::rename(&copy, &path).unwrap();
    reopened(&engine).unwrap();
}

#[test]
fn a_file_that_is_cut_off_while_it_is_read_is_an_error_with_section_and_place() {
    let (_folder, path, engine) = opened();
    let reader = engine.reader().unwrap();
    let section = engine.manifest().sections.last().unwrap();
    let Section { name, offset, bytes, .. } = section;
    writable(&path).set_len(offset + 5).unwrap();
    let error = reader.section(name).bytes().unwrap_err().to_string();
    let (at, end) = (offset + 5, offset + bytes);
    assert_eq!(
        error,
        format!(
            "engine {}: ends at byte {at}, inside of section `{name}` (bytes {offset} to {end}): \
             load the model again once the file is whole",
            path.display()
        )
    );
    // What is still there is read; that it is of a whole file is settled at the end.
    assert_eq!(reader.section("embed").bytes().unwrap(), contents(engine.section("embed"), 0));
    assert!(changed(&path, reader.finish()).starts_with("it has "));
}

#[test]
fn a_file_that_is_written_to_while_it_is_read_is_refused_at_the_end() {
    let (_folder, path, engine) = opened();
    let reader = engine.reader().unwrap();
    reader.section("embed").bytes().unwrap();
    writable(&path).write_all_at(b"other", engine.section("embed").offset).unwrap();
    assert!(changed(&path, reader.finish()).starts_with("it was written to at "));
}

#[test]
fn a_file_that_is_replaced_while_it_is_read_is_read_to_its_end() {
    let (_folder, path, engine) = opened();
    let reader = engine.reader().unwrap();
    seal(&path, tiny_manifest(), 1).commit().unwrap();
    for section in &engine.manifest().sections {
        assert_eq!(reader.section(&section.name).bytes().unwrap(), contents(section, 0));
    }
    reader.finish().unwrap();
}

#[test]
#[should_panic(expected = "section `embed` takes 512 bytes, not more")]
fn reading_beyond_a_section_is_a_mistake_of_the_caller() {
    let (_folder, _, engine) = opened();
    let _ = engine.reader().unwrap().section("embed").read(509, &mut [0; 4]);
}

#[test]
fn a_section_is_read_in_pieces() {
    let (_folder, _, engine) = opened();
    let reader = engine.reader().unwrap();
    let embed = reader.section("embed");
    let mut bytes = vec![0; embed.len()];
    for (idx, piece) in bytes.chunks_mut(100).enumerate() {
        embed.read(100 * idx, piece).unwrap();
    }
    assert_eq!(bytes, contents(engine.section("embed"), 0));
}
