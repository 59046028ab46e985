//! A file appears whole or not at all, and nothing is left behind.

use super::*;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

#[test]
fn the_old_file_stands_until_the_commit() {
    let (folder, path) = tiny_engine();
    let old = fs::read(&path).unwrap();
    let sealed = seal(&path, tiny_manifest(), 1);
    assert!(fs::read(&path).unwrap() == old);
    assert_eq!(names_in(folder.path()).len(), 2);
    sealed.commit().unwrap();
    assert!(fs::read(&path).unwrap() != old);
    assert_eq!(names_in(folder.path()), ["target.engine"]);
}

#[test]
fn dropping_at_any_stage_leaves_no_trace() {
    let (folder, path) = tiny_engine();
    let old = fs::read(&path).unwrap();
    let writer = EngineWriter::create(&path, tiny_manifest()).unwrap();
    writer.section("embed").write(b"half").unwrap();
    drop(writer);
    drop(seal(&path, tiny_manifest(), 1));
    assert_eq!(names_in(folder.path()), ["target.engine"]);
    assert!(fs::read(&path).unwrap() == old);
}

#[test]
fn two_builds_of_one_path_do_not_disturb_each_other() {
    let (folder, path) = tiny_engine();
    let first = seal(&path, tiny_manifest(), 1);
    let second = seal(&path, tiny_manifest(), 2);
    first.commit().unwrap();
    second.commit().unwrap();
    let engine = Engine::open(&path).unwrap();
    engine.verify_hashes(|_| ()).unwrap();
    assert_eq!(section(&engine, "embed"), contents(&engine.manifest().sections[0], 2));
    assert_eq!(names_in(folder.path()), ["target.engine"]);
}

const CHILD_FOLDER: &str = "SPEC_ENGINE_TEST_FOLDER";

/// Writes half an engine, says so, and waits to be killed: what the test below starts as a process of its
/// own. Run by itself it does nothing.
#[test]
fn half_an_engine() {
    let Some(folder) = std::env::var_os(CHILD_FOLDER) else { return };
    let path = PathBuf::from(folder).join("target.engine");
    let writer = EngineWriter::create(path, tiny_manifest()).unwrap();
    writer.section("embed").write(b"half").unwrap();
    println!("half done");
    // Returns at once if the parent is gone.
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

#[test]
fn a_killed_build_leaves_the_old_engine_whole() {
    let (folder, path) = tiny_engine();
    let old = fs::read(&path).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", "engine::tests::writing::half_an_engine"])
        .env(CHILD_FOLDER, folder.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.ends_with("half done")));

    // Alive, its file is not touched by another build.
    drop(seal(&path, tiny_manifest(), 1));
    assert_eq!(names_in(folder.path()).len(), 2);

    child.kill().unwrap();
    child.wait().unwrap();
    assert!(fs::read(&path).unwrap() == old);
    assert_eq!(names_in(folder.path()).len(), 2);
    fs::write(folder.path().join(".target.engine.7.tmp"), "of someone else").unwrap();
    fs::write(folder.path().join(".other.engine.7-0123456789abcdef.tmp"), "same").unwrap();
    let kept = [".other.engine.7-0123456789abcdef.tmp", ".target.engine.7.tmp", "target.engine"];
    drop(EngineWriter::create(&path, tiny_manifest()).unwrap());
    assert_eq!(names_in(folder.path()), kept);
}

#[test]
fn what_would_not_open_is_not_written() {
    let (folder, path) = tiny_engine();
    let mut manifest = tiny_manifest();
    manifest.limits.max_seq_len = 65;
    assert_eq!(
        EngineWriter::create(&path, manifest).unwrap_err().to_string(),
        format!("engine {}: limits: max_seq_len is 65, expected 1 to 64", path.display())
    );
    let mut manifest = tiny_manifest();
    manifest.model.vocab_size = usize::MAX;
    EngineWriter::create(&path, manifest).unwrap_err();
    let mut manifest = tiny_manifest();
    (manifest.model.tied_head, manifest.model.draft_vocab) = (false, Some(3));
    let error = EngineWriter::create(&path, manifest).unwrap_err().to_string();
    assert!(error.ends_with("a target has logits of 3 tokens, expected all 8"), "{error}");
    let error = EngineWriter::create(folder.path(), tiny_manifest()).unwrap_err().to_string();
    assert_eq!(error, format!("{}: is a directory", folder.path().display()));
    let absent = folder.path().join("absent/x");
    let error = EngineWriter::create(absent, tiny_manifest()).unwrap_err().to_string();
    assert!(error.contains("absent/") && error.contains("No such file"), "{error}");
    assert_eq!(names_in(folder.path()), ["target.engine"]);
}

#[test]
#[should_panic(expected = "section `embed` has 4 of 512 bytes")]
fn a_short_section_is_a_mistake_of_the_builder() {
    let folder = TempDir::new().unwrap();
    let writer = EngineWriter::create(folder.path().join("x"), tiny_manifest()).unwrap();
    let mut section = writer.section("embed");
    section.write(b"four").unwrap();
    section.close();
}

#[test]
#[should_panic(expected = "section `embed` takes 512 bytes, not more")]
fn a_long_section_is_a_mistake_of_the_builder() {
    let folder = TempDir::new().unwrap();
    let writer = EngineWriter::create(folder.path().join("x"), tiny_manifest()).unwrap();
    let _ = writer.section("embed").write(&[0; 513]);
}

#[test]
#[should_panic(expected = "section `embed` is started twice")]
fn a_section_written_twice_is_a_mistake_of_the_builder() {
    let folder = TempDir::new().unwrap();
    let writer = EngineWriter::create(folder.path().join("x"), tiny_manifest()).unwrap();
    drop(writer.section("embed"));
    writer.section("embed");
}

#[test]
#[should_panic(expected = "section `embed` was not written")]
fn a_forgotten_section_is_a_mistake_of_the_builder() {
    let folder = TempDir::new().unwrap();
    let writer = EngineWriter::create(folder.path().join("x"), tiny_manifest()).unwrap();
    let _ = writer.seal();
}
