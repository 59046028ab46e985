//! Targets and drafts that do and do not belong together.

use super::*;
use crate::engine::commit_pair;
use crate::exec::vocab_map;
use crate::model::{DraftHead, MedusaConfig};

fn manifests() -> (Manifest, Manifest) {
    let mut target = tiny_manifest();
    target.drafter = DrafterKind::Model(peer("draft.engine", ""));
    let mut draft = tiny_manifest();
    draft.role = Role::Draft;
    draft.target = Some(peer("target.engine", ""));
    draft.model.intermediate_size = 1;
    draft.model.vocab_size = 10;
    (target, draft)
}

fn sealed(folder: &Path, salt: u8) -> (Sealed, Sealed) {
    let (target, draft) = manifests();
    (
        seal(&folder.join("target.engine"), target, salt),
        seal(&folder.join("draft.engine"), draft, salt),
    )
}

fn written(folder: &Path, salt: u8) -> (Manifest, Manifest) {
    let (target, draft) = sealed(folder, salt);
    commit_pair(target, draft).unwrap();
    let target = Engine::open(folder.join("target.engine")).unwrap();
    let draft = target.open_drafter().unwrap().unwrap();
    (target.manifest().clone(), draft.manifest().clone())
}

#[test]
fn a_drafters_tokens_are_those_of_its_vocabulary() {
    let folder = TempDir::new().unwrap();
    let (target, mut draft) = manifests();
    (draft.model.tied_head, draft.model.draft_vocab) = (false, Some(3));
    let target = seal(&folder.path().join("target.engine"), target, 0);
    // What is written here is hashes, which as numbers are hardly ever tokens.
    commit_pair(target, seal(&folder.path().join("draft.engine"), draft, 0)).unwrap();
    let target = Engine::open(folder.path().join("target.engine")).unwrap();
    assert_eq!(vocab_map::of(&target).unwrap(), None);
    let error = vocab_map::of(&target.open_drafter().unwrap().unwrap()).unwrap_err().to_string();
    assert!(error.contains("row 0 of its head is token") && error.ends_with("of 10"), "{error}");
}

#[test]
fn a_pair_names_each_other() {
    let folder = TempDir::new().unwrap();
    let (target, draft) = written(folder.path(), 0);
    assert_eq!(target.drafter, DrafterKind::Model(peer("draft.engine", &draft.identity)));
    assert_eq!(draft.target, Some(peer("target.engine", &target.identity)));
    assert_ne!(target.identity, draft.identity);
    assert_eq!(names_in(folder.path()), ["draft.engine", "target.engine"]);
    for name in names_in(folder.path()) {
        Engine::open(folder.path().join(name)).unwrap().verify_hashes(|_| ()).unwrap();
    }
}

#[test]
fn an_engine_that_drafts_alone_opens_no_drafter() {
    let (_folder, path) = tiny_engine();
    assert!(Engine::open(path).unwrap().open_drafter().unwrap().is_none());
}

#[test]
fn an_exchanged_draft_is_refused_with_both_identities() {
    let folder = TempDir::new().unwrap();
    let (_, named) = written(folder.path(), 0);
    let target = fs::read(folder.path().join("target.engine")).unwrap();
    let (_, found) = written(folder.path(), 1);
    fs::write(folder.path().join("target.engine"), target).unwrap();
    let engine = Engine::open(folder.path().join("target.engine")).unwrap();
    assert_eq!(
        engine.open_drafter().unwrap_err().to_string(),
        format!(
            "target and draft: the target names draft \"draft.engine\" {}, found {}: \
             rebuild both with spec-build",
            named.identity, found.identity
        )
    );
}

#[test]
fn every_mismatch_names_both_values() {
    let folder = TempDir::new().unwrap();
    let (target, draft) = written(folder.path(), 0);
    Manifest::check_pair(&target, &draft).unwrap();
    let refusal = |edit: &dyn Fn(&mut Manifest, &mut Manifest)| {
        let (mut target, mut draft) = (target.clone(), draft.clone());
        edit(&mut target, &mut draft);
        let error = Manifest::check_pair(&target, &draft).unwrap_err().to_string();
        let what = error.strip_prefix("target and draft: ").unwrap();
        what.strip_suffix(": rebuild both with spec-build").unwrap().to_string()
    };
    assert_eq!(
        refusal(&|target, draft| std::mem::swap(target, draft)),
        "a draft and a target, expected a target and a draft"
    );
    assert_eq!(
        refusal(&|target, _| target.role = Role::Draft),
        "a draft and a draft, expected a target and a draft"
    );
    assert_eq!(
        refusal(&|target, _| target.drafter = DrafterKind::None),
        "the target drafts by None, not by a model"
    );
    assert_eq!(refusal(&|_, draft| draft.target = None), "the draft names no target");
    assert_eq!(
        refusal(&|target, _| target.identity = "t".into()),
        format!("the draft names target \"target.engine\" {}, found t", target.identity)
    );
    assert_eq!(
        refusal(&|_, draft| draft.identity = "d".into()),
        format!("the target names draft \"draft.engine\" {}, found d", draft.identity)
    );
    assert_eq!(
        refusal(&|_, draft| draft.tokenizer = "8".into()),
        format!("the target has tokenizer {}, the draft 8", target.tokenizer)
    );
    let medusa = |draft: &mut Manifest| {
        let own_heads = vec![true];
        let medusa = MedusaConfig { tap: 1, num_blocks: 1, block_bias: true, own_heads };
        draft.model.draft_head = Some(DraftHead::Medusa(medusa));
    };
    let vocab_size = target.model.vocab_size;
    assert_eq!(
        refusal(&|_, draft| medusa(draft)),
        format!("vocab_size is {vocab_size} in the target, the head is made for 10")
    );
    let hidden_size = target.model.hidden_size;
    assert_eq!(
        refusal(&|target, draft| {
            medusa(draft);
            target.model.hidden_size += 1;
        }),
        format!(
            "hidden_size is {} in the target, the head is made for {hidden_size}",
            hidden_size + 1
        )
    );
    let limits: [LimitsCase; 4] = [
        (|l| l.max_draft_len = 3, "max_draft_len is 4 in the target, only 3 in the draft"),
        (|l| l.max_batch_size = 1, "max_batch_size is 2 in the target, only 1 in the draft"),
        (|l| l.max_seq_len = 31, "max_seq_len is 32 in the target, only 31 in the draft"),
        (|l| l.max_num_tokens = 15, "max_num_tokens is 16 in the target, only 15 in the draft"),
    ];
    for (edit, expected) in limits {
        assert_eq!(refusal(&|_, draft| edit(&mut draft.limits)), expected);
    }
}

#[test]
fn a_pair_that_does_not_fit_is_not_published() {
    let folder = TempDir::new().unwrap();
    written(folder.path(), 0);
    let before = fs::read(folder.path().join("draft.engine")).unwrap();
    let (target, mut draft) = manifests();
    draft.tokenizer = "8".repeat(64);
    let target = seal(&folder.path().join("target.engine"), target, 1);
    let draft = seal(&folder.path().join("draft.engine"), draft, 1);
    commit_pair(target, draft).unwrap_err();
    assert_eq!(names_in(folder.path()), ["draft.engine", "target.engine"]);
    assert!(fs::read(folder.path().join("draft.engine")).unwrap() == before);
}

#[test]
fn a_known_peer_needs_no_pair() {
    let folder = TempDir::new().unwrap();
    let (first, _) = written(folder.path(), 0);
    let path = folder.path().join("target.engine");
    let bytes = fs::read(&path).unwrap();
    let mut again = first.clone();
    again.identity.clear();
    again.sections.clear();
    seal(&path, again, 0).commit().unwrap();
    assert!(fs::read(&path).unwrap() == bytes);
    Engine::open(&path).unwrap().open_drafter().unwrap();
}

#[test]
#[should_panic(expected = "the peer's identity is unknown")]
fn half_a_pair_is_not_published() {
    let folder = TempDir::new().unwrap();
    let (target, _draft) = sealed(folder.path(), 0);
    let _ = target.commit();
}
