//! A build that is killed leaves the old version whole, or none; the next one cleans up.

use super::support::{Checkpoint, build_args, command, names_in, succeeds};
use spec_core::runtime::ModelFolder;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

const NUM_KILLS: u32 = 24;
/// Kills are spread over this much of the time that a build takes.
const SPREAD: f64 = 1.1;

/// Opens the model and reads all of it; its longest draft tells the versions apart.
fn whole_version(model: &Path) -> usize {
    let folder = ModelFolder::open(model).expect("the version opens");
    folder.target.verify_hashes(|_| ()).expect("the version is whole");
    folder.target.manifest().limits.max_draft_len
}

#[test]
fn a_build_killed_at_any_moment_leaves_a_whole_version_or_none() {
    let dir = tempfile::tempdir().unwrap();
    let (from, model) = (dir.path().join("checkpoint"), dir.path().join("model"));
    Checkpoint::new(1, 256, 1024, 12).write(&from);
    let args = |len: usize| {
        build_args(&from, &model, &["--draft", "ngram", "--max-draft-len", &len.to_string()])
    };
    // The first one finds nothing in memory, and takes longer.
    let took = [1, 2].map(|_| {
        let start = Instant::now();
        succeeds(&args(1));
        std::fs::remove_dir_all(&model).unwrap();
        start.elapsed()
    });
    let mut whole_build = took[0].min(took[1]);

    let mut killed = 0;
    let mut current = None;
    for kill in 0..NUM_KILLS {
        // Half way through, a version is there from then on.
        if kill == NUM_KILLS / 2 {
            succeeds(&args(1));
            current = Some(1);
        }
        let len = 2 + kill as usize;
        let mut child = command(&args(len)).spawn().unwrap();
        // Fractions of the golden ratio fall evenly, whatever their number.
        let share = (f64::from(kill) * 0.618_033_988_75).fract();
        thread::sleep(whole_build.mul_f64(SPREAD * share) + Duration::from_millis(1));
        child.kill().unwrap();
        match child.wait().unwrap().code() {
            None => killed += 1,
            // The machine has become faster.
            Some(_) => whole_build = whole_build.mul_f64(0.8),
        }
        let place = model.join("1");
        let found = place.exists().then(|| whole_version(&model));
        assert!(found == current || found == Some(len), "{found:?} after {current:?} and {len}");
        current = found;
    }
    assert!(killed >= NUM_KILLS / 2, "only {killed} builds were killed before their end");

    succeeds(&args(99));
    assert_eq!(whole_version(&model), 99);
    assert_eq!(names_in(&model), ["1", "config.pbtxt"]);
    assert_eq!(names_in(&model.join("1")), ["target.engine", "tokenizer.json"]);
}
