//! Manifests that were made to harm: their hash is right, what they say is not.

use super::*;
use crate::engine::CostTable;
use crate::model::{KvScales, LayerSkip};
use serde_json::Value;
use std::sync::LazyLock;

/// A file with this manifest, as long as [`placed_manifest`] says, with zeros for sections.
fn with_manifest(json: &[u8]) -> Vec<u8> {
    static LEN: LazyLock<u64> = LazyLock::new(|| {
        let manifest = placed_manifest();
        manifest.sections.last().map(|section| section.offset + section.bytes).unwrap()
    });
    let mut file = format::frame(json);
    file.resize(file.len().max(*LEN as usize), 0);
    file
}

fn refusal_of(json: &str) -> String {
    parse_bytes(&with_manifest(json.as_bytes())).unwrap_err()
}

/// The message for an edited manifest whose identity fits the edit.
fn refusal(edit: impl FnOnce(&mut Manifest)) -> String {
    let mut manifest = placed_manifest();
    edit(&mut manifest);
    manifest.identity = manifest.compute_identity();
    parse_bytes(&with_manifest(&serde_json::to_vec(&manifest).unwrap())).unwrap_err()
}

#[test]
fn sections_must_be_those_of_the_model() {
    assert_eq!(
        refusal(|m| m.sections.swap(0, 1)),
        r#"section 0 is "layers.0.input_norm", expected `embed`"#
    );
    assert_eq!(
        refusal(|m| m.sections[3].name = "embed".into()),
        r#"section 3 is "embed", expected `layers.0.out`"#
    );
    assert_eq!(refusal(|m| drop(m.sections.pop())), "section `final_norm` is missing");
    assert_eq!(refusal(|m| m.sections.clear()), "section `embed` is missing");
    assert_eq!(
        refusal(|m| m.sections.push(Section { name: "x\n".into(), ..m.sections[0].clone() })),
        r#"section "x\n" is not part of the model"#
    );
}

#[test]
fn sections_must_have_the_shape_and_size_of_the_model() {
    assert_eq!(
        refusal(|m| m.sections[2].shape = vec![usize::MAX, 3]),
        "section `layers.0.qkv` is a Weight of bf16 [18446744073709551615, 3], \
         expected a Weight of bf16 [8, 3]"
    );
    assert_eq!(
        refusal(|m| m.sections[2].dtype = Some(Dtype::Fp16)),
        "section `layers.0.qkv` is a Weight of fp16 [8, 3], expected a Weight of bf16 [8, 3]"
    );
    assert_eq!(
        refusal(|m| m.sections[7].bytes = u64::MAX),
        "section `final_norm` takes 18446744073709551615 bytes, expected 12"
    );
    assert_eq!(
        refusal(|m| m.sections[7].hash = "F".repeat(64)),
        format!(
            "section `final_norm`: hash is {:?}, expected 64 lowercase hex digits",
            "F".repeat(64)
        )
    );
}

#[test]
fn sections_must_lie_where_the_layout_puts_them() {
    let right = placed_manifest().sections[1].offset;
    for wrong in [0, right - 1, right + 1, right + 256, right - 256, u64::MAX, u64::MAX - 255] {
        let message = refusal(|m| m.sections[1].offset = wrong);
        let expected =
            format!("section `layers.0.input_norm` starts at byte {wrong}, expected {right}");
        // A number of another length may move every section.
        let moved = message.starts_with("section `embed` starts at byte ");
        assert!(message == expected || moved, "{message}");
    }
    assert_eq!(
        refusal(|m| m.sections[1].offset = right + 1),
        format!("section `layers.0.input_norm` starts at byte {}, expected {right}", right + 1)
    );
}

#[test]
fn limits_must_be_sane() {
    let cases: [LimitsCase; 8] = [
        (|l| l.max_draft_len = 129, "max_draft_len is 129, expected 0 to 128"),
        (|l| l.max_batch_size = 0, "max_batch_size is 0, expected 1 to 65536"),
        (|l| l.max_num_tokens = 0, "max_num_tokens is 0, expected 1 to 1048576"),
        (|l| l.max_seq_len = 0, "max_seq_len is 0, expected 1 to 64"),
        (|l| l.max_seq_len = 65, "max_seq_len is 65, expected 1 to 64"),
        (
            |l| l.max_num_tokens = usize::MAX,
            "max_num_tokens is 18446744073709551615, expected 1 to 1048576",
        ),
        (|l| l.max_num_tokens = 4, "max_draft_len 4 plus 1 is more than max_num_tokens 4"),
        (|l| l.max_seq_len = 4, "max_draft_len 4 plus 1 is more than max_seq_len 4"),
    ];
    for (edit, expected) in cases {
        assert_eq!(refusal(|m| edit(&mut m.limits)), format!("limits: {expected}"));
    }
    assert_eq!(
        refusal(|m| {
            m.limits.max_draft_len = 0;
            m.drafter = DrafterKind::Ngram { max_ngram: 3, min_ngram: 1 };
        }),
        "limits: max_draft_len is 0, expected at least 1 with a drafter"
    );
}

#[test]
fn the_model_must_be_sane() {
    assert_eq!(
        refusal(|m| m.model.num_layers = usize::MAX),
        "model config: num_layers is 18446744073709551615, expected 1 to 1024"
    );
    assert_eq!(
        refusal(|m| m.model.num_kv_heads = 3),
        "model config: num_heads 2 is no multiple of num_kv_heads 3"
    );
}

#[test]
fn the_other_fields_must_be_sane() {
    let none = |m: &mut Manifest| m.role = Role::Draft;
    assert_eq!(refusal(none), "a draft names no target, expected one");
    let hash = "a".repeat(64);
    assert_eq!(
        refusal(|m| m.target = Some(peer("t", &hash))),
        r#"a target names "t" as its target, expected none"#
    );
    assert_eq!(
        refusal(|m| {
            m.role = Role::Draft;
            m.target = Some(peer("t", &hash));
            m.drafter = DrafterKind::Model(peer("d", &hash));
        }),
        "a draft names a drafter, expected none"
    );
    for file in ["", "..", "/etc/passwd", "../x", "a\0"] {
        assert_eq!(
            refusal(|m| m.drafter = DrafterKind::Model(peer(file, &hash))),
            format!("peer {file:?} is no plain file name")
        );
    }
    assert_eq!(
        refusal(|m| m.drafter = DrafterKind::Model(peer("d", "x"))),
        r#"peer identity is "x", expected 64 lowercase hex digits"#
    );
    assert_eq!(
        refusal(|m| m.drafter = DrafterKind::Ngram { max_ngram: 1, min_ngram: 2 }),
        "ngram: min_ngram is 2, expected 1 to max_ngram 1"
    );
    for kv in [Dtype::Bf16, Dtype::Int8, Dtype::Int4] {
        assert_eq!(
            refusal(|m| m.precision.kv = kv),
            format!("kv is {kv}, engines for CPUs take fp32, fp16 or fp8")
        );
    }
    for max_tokens in [0, usize::MAX] {
        assert_eq!(
            refusal(|m| m.drafter = DrafterKind::Suffix { max_tokens }),
            format!("suffix: max_tokens is {max_tokens}, expected 1 to 67108864")
        );
    }
    let skip = |attention: &[usize], mlp: &[usize]| {
        let layers = LayerSkip { attention: attention.into(), mlp: mlp.into() };
        refusal(|m| m.drafter = DrafterKind::Skip { layers: layers.clone(), costs: None })
    };
    assert_eq!(skip(&[], &[]), "skip: nothing is left out");
    assert_eq!(
        skip(&[0], &[usize::MAX]),
        format!("skip: mlp of layer {}, expected numbers below 1", usize::MAX)
    );
    assert_eq!(skip(&[0, 0], &[]), "skip: attention of layers [0, 0], expected ascending numbers");
    assert_eq!(
        refusal(|m| m.tokenizer.truncate(3)),
        r#"tokenizer is "777", expected 64 lowercase hex digits"#
    );
    assert_eq!(refusal(|m| m.end_tokens.push(8)), "special token 8 is outside the vocabulary of 8");
    assert_eq!(
        refusal(|m| m.bos_token = Some(u32::MAX)),
        "special token 4294967295 is outside the vocabulary of 8"
    );
}

#[test]
fn scales_must_be_those_of_an_fp8_cache_of_the_model() {
    let scales = |num_layers| KvScales {
        keys: vec![vec![0]; num_layers],
        values: vec![vec![-3]; num_layers],
    };
    assert_eq!(
        refusal(|m| m.kv_scales = Some(scales(1))),
        "kv_scales: keys and values are fp16, expected fp8"
    );
    assert_eq!(
        refusal(|m| (m.precision.kv, m.kv_scales) = (Dtype::Fp8, Some(scales(2)))),
        "kv_scales: scales of keys of 2 layers, the model has 1"
    );
}

#[test]
fn cost_tables_must_be_sane() {
    let message_of = |rows: &[usize], step_ms: &[f64], position_ns: f64| {
        let (rows, step_ms) = (rows.to_vec(), step_ms.to_vec());
        refusal(|m| {
            m.costs = Some(CostTable { rows, step_ms, position_ns, ..CostTable::default() })
        })
    };
    let message = |rows: &[usize], step_ms: &[f64]| message_of(rows, step_ms, 0.0);
    assert_eq!(message(&[1, 2], &[1.0]), "costs: 2 rows for 1 times");
    assert_eq!(message(&[], &[]), "costs: 0 rows for 0 times");
    assert_eq!(message(&[2, 2], &[1.0, 1.0]), "costs: rows do not ascend from 1");
    assert_eq!(message(&[0, 2], &[1.0, 1.0]), "costs: rows do not ascend from 1");
    assert_eq!(message(&[1], &[-1.0]), "costs: a step takes -1 ms, expected more than 0");
    assert_eq!(
        message_of(&[1], &[1.0], -0.5),
        "costs: a position takes -0.5 ns, expected 0 or more"
    );
    let table = CostTable { rows: vec![1], step_ms: vec![1.0], ..CostTable::default() };
    assert_eq!(
        refusal(|m| m.costs = Some(CostTable { prompt_token_ms: -1.0, ..table.clone() })),
        "costs: a prompt's token takes -1 ms, expected 0 or more"
    );
    assert_eq!(
        refusal(|m| m.costs = Some(CostTable { acceptance: vec![0.5, 1.0], ..table.clone() })),
        "costs: 1 of drafts are accepted, expected a share between 0 and 1"
    );
}

#[test]
fn an_identity_that_does_not_fit_the_parts_is_refused() {
    let mut manifest = placed_manifest();
    let right = std::mem::replace(&mut manifest.identity, "0".repeat(64));
    let json = serde_json::to_string(&manifest).unwrap();
    assert_eq!(
        refusal_of(&json),
        format!("identity is {}, its parts give {right}", "0".repeat(64))
    );
}

#[test]
fn json_that_is_no_manifest_is_refused() {
    let json = serde_json::to_string(&placed_manifest()).unwrap();
    let deep = "[".repeat(100_000);
    assert!(refusal_of(&deep).starts_with("manifest: "), "{}", refusal_of(&deep));
    let deep = json.replacen("\"spec-build 0.1.0\"", &deep, 1);
    assert!(refusal_of(&deep).starts_with("manifest: invalid type: sequence"));
    let deep = json.replacen('{', &format!("{{\"x\":{}", "{\"x\":".repeat(100_000)), 1);
    assert!(refusal_of(&deep).starts_with("manifest: unknown field `x`"));
    for (from, to, expected) in [
        ("{", "{\"role\":\"draft\",", "manifest: duplicate field `role`"),
        ("\"limits\"", "\"Limits\"", "manifest: unknown field `Limits`"),
        ("\"bos_token\":1", "\"bos_token\":-1", "manifest: invalid value: integer `-1`"),
        ("\"bos_token\":1", "\"bos_token\":1e400", "manifest: number out of range"),
        ("\"kind\":\"cpu\"", "\"kind\":\"abacus\"", "manifest: unknown variant `abacus`"),
        ("\"vocab_size\":8", "\"vocab_size\":18446744073709551616", "manifest: invalid type"),
        ("\"builder\":\"spec-build 0.1.0\",", "", "manifest: missing field `builder`"),
    ] {
        let altered = json.replacen(from, to, 1);
        assert_ne!(altered, json, "{from}");
        let message = refusal_of(&altered);
        assert!(message.starts_with(expected), "{message}");
    }
    let message = refusal_of(&(json + "{}"));
    assert!(message.starts_with("manifest: trailing characters"), "{message}");
    assert!(parse_bytes(&with_manifest(b"\xff\xfe")).is_err());
}

#[test]
fn hostile_names_cannot_forge_or_flood_the_log() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("x");
    let json = format!("{{\"\\nERROR all is lost{}\":1}}", "y".repeat(1 << 20));
    fs::write(&path, with_manifest(json.as_bytes())).unwrap();
    let error = open_error(&path);
    assert!(error.contains(r"unknown field `\nERROR all is lostyyy"), "{error}");
    assert!(error.ends_with("yyy...: rebuild with spec-build"), "{error}");
    assert!(error.lines().count() == 1 && error.len() < 700, "{}", error.len());
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end as u64) as usize
    }

    fn mutate(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(4) {
            let (at, other) = (self.below(bytes.len()), self.below(bytes.len()));
            match self.below(5) {
                0 => bytes[at] ^= 1 << self.below(8),
                1 => bytes[at] = [0, 0xff, b'9', b'-', b'"', b'}'][self.below(6)],
                2 => drop(bytes.drain(at.min(other)..=at.max(other).min(at.min(other) + 40))),
                3 => bytes.insert(at, b"0123456789,:[]{}\"e."[self.below(19)]),
                _ => bytes.swap(at, other),
            }
            if bytes.is_empty() {
                bytes.push(0);
            }
        }
    }
}

/// Whatever was accepted must hold what the reader relies on.
fn assert_safe(file: &[u8], manifest: &Manifest) {
    for section in &manifest.sections {
        assert!(section.offset + section.bytes <= file.len() as u64, "{section:?}");
    }
    assert_eq!(manifest.identity, manifest.compute_identity());
}

#[test]
fn random_damage_never_panics() {
    let valid = tiny_file();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for _ in 0..20_000 {
        let mut file = valid.clone();
        random.mutate(&mut file);
        if let Ok(manifest) = parse_bytes(&file) {
            assert_safe(&file, &manifest);
        }
    }
}

#[test]
fn random_manifests_with_the_right_hash_never_panic() {
    let valid = serde_json::to_vec(&placed_manifest()).unwrap();
    let mut random = Random(0xdead_beef_cafe_f00d);
    parse_bytes(&with_manifest(&valid)).unwrap();
    let mut parsed = 0;
    for _ in 0..20_000 {
        let mut json = valid.clone();
        random.mutate(&mut json);
        let file = with_manifest(&json);
        let result = parse_bytes(&file);
        parsed += usize::from(!matches!(&result, Err(what) if what.starts_with("manifest: ")));
        if let Ok(manifest) = result {
            assert_safe(&file, &manifest);
        }
    }
    assert!(parsed > 1000, "only {parsed} of the mutants were JSON of the right form");
}

#[test]
fn hostile_values_in_every_field_never_panic() {
    let valid = serde_json::to_value(placed_manifest()).unwrap();
    let hostile = [
        "0",
        "1",
        "-1",
        "1e308",
        "18446744073709551615",
        "9223372036854775807",
        "4294967296",
        "1e-320",
        "null",
        "[]",
        "{}",
        "\"\"",
        "true",
        "[0]",
        "\"fp8\"",
        "\"int8\"",
    ];
    let pointers = pointers(&valid);
    assert!(pointers.len() > 60);
    for pointer in &pointers {
        for value in hostile {
            let mut altered = valid.clone();
            *altered.pointer_mut(pointer).unwrap() = serde_json::from_str(value).unwrap();
            // Where it still is a manifest, give it a fitting identity, so that every check is met.
            if let Ok(mut manifest) = serde_json::from_value::<Manifest>(altered.clone()) {
                manifest.identity = manifest.compute_identity();
                altered = serde_json::to_value(manifest).unwrap();
            }
            let file = with_manifest(altered.to_string().as_bytes());
            if let Ok(manifest) = parse_bytes(&file) {
                assert_safe(&file, &manifest);
            }
        }
    }
}

/// JSON pointers of every value inside `value`.
fn pointers(value: &Value) -> Vec<String> {
    let children: Vec<(String, &Value)> = match value {
        Value::Object(map) => map.iter().map(|(key, value)| (key.clone(), value)).collect(),
        Value::Array(list) => {
            list.iter().enumerate().map(|(idx, value)| (idx.to_string(), value)).collect()
        }
        _ => Vec::new(),
    };
    let mut all = Vec::new();
    for (key, child) in children {
        all.push(format!("/{key}"));
        all.extend(pointers(child).into_iter().map(|rest| format!("/{key}{rest}")));
    }
    all
}
