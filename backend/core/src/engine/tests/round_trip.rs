//! What was written is what is read, and the same inputs give the same bytes.

use super::*;
use std::thread;

#[test]
fn what_was_written_is_read() {
    let (_folder, path) = tiny_engine();
    let engine = Engine::open(&path).unwrap();
    let manifest = engine.manifest();
    for one in &manifest.sections {
        assert_eq!(section(&engine, &one.name), contents(one, 0), "{}", one.name);
    }
    let mut given = tiny_manifest();
    given.identity = manifest.compute_identity();
    given.sections.clone_from(&manifest.sections);
    assert_eq!(*manifest, given);
    assert_eq!(engine.path(), path);
}

#[test]
fn floats_are_the_bytes_in_little_endian() {
    let (_folder, path) = tiny_engine();
    let engine = Engine::open(path).unwrap();
    let bytes = section(&engine, "final_norm");
    let expected: Vec<u32> =
        bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
    let floats = engine.reader().unwrap().section("final_norm").floats().unwrap();
    let found: Vec<u32> = floats.iter().map(|value| value.to_bits()).collect();
    assert_eq!(found, expected);
    assert_eq!(found.len(), 3);
}

#[test]
fn every_combination_of_options_round_trips() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("a.engine");
    for options in 0..32u32 {
        for dtype in Dtype::ALL {
            let mut manifest = tiny_manifest();
            let on = |bit: u32| options >> bit & 1 == 1;
            manifest.model.tied_head = on(0);
            manifest.model.qkv_bias = on(1);
            manifest.model.out_bias = on(2);
            manifest.model.mlp_bias = on(3);
            manifest.model.qk_norm = on(4);
            manifest.model.num_layers = 2;
            manifest.precision.weights = dtype;
            manifest.precision.head = if on(0) { dtype } else { Dtype::Fp8 };
            seal(&path, manifest, 3).commit().unwrap();
            Engine::open(&path).unwrap().verify_hashes(|_| ()).unwrap();
        }
    }
}

#[test]
fn verifying_reports_every_byte_once() {
    let (_folder, path) = tiny_engine();
    let engine = Engine::open(path).unwrap();
    let mut reports = Vec::new();
    engine.verify_hashes(|bytes| reports.push(bytes)).unwrap();
    assert!(reports.is_sorted());
    let total: u64 = engine.manifest().sections.iter().map(|section| section.bytes).sum();
    assert_eq!(reports.last(), Some(&total));
}

#[test]
fn the_bytes_depend_on_neither_threads_nor_chunks() {
    let one_by_one = tiny_file();
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("other-name.engine");
    let writer = EngineWriter::create(&path, tiny_manifest()).unwrap();
    let ready = std::sync::Barrier::new(writer.sections().len());
    thread::scope(|scope| {
        for (idx, section) in writer.sections().iter().enumerate().rev() {
            let (writer, ready) = (&writer, &ready);
            scope.spawn(move || {
                let mut out = writer.section(&section.name);
                ready.wait();
                for chunk in contents(section, 0).chunks(idx + 1) {
                    out.write(chunk).unwrap();
                }
                out.close();
            });
        }
    });
    writer.seal().unwrap().commit().unwrap();
    assert!(fs::read(path).unwrap() == one_by_one);
}

#[test]
fn identity_follows_contents_and_device_but_not_peers_and_limits() {
    let folder = TempDir::new().unwrap();
    let identity = |manifest: Manifest, salt| {
        seal(&folder.path().join("a"), manifest, salt).manifest().identity.clone()
    };
    let plain = identity(tiny_manifest(), 0);
    assert_eq!(plain.len(), 64);

    let mut same = tiny_manifest();
    same.builder = "spec-build 9.9.9 with a far longer name".repeat(20);
    same.limits.max_batch_size = 1;
    same.drafter = DrafterKind::Model(peer("draft.engine", ""));
    assert_eq!(identity(same, 0), plain);

    assert_ne!(identity(tiny_manifest(), 1), plain);
    let mut other = tiny_manifest();
    other.model.rope_theta = 20_000.0;
    assert_ne!(identity(other, 0), plain);
    let mut other = tiny_manifest();
    other.precision.kv = Dtype::Fp8;
    assert_ne!(identity(other, 0), plain);

    let plain = identity(cuda_manifest(), 0);
    let mut other = cuda_manifest();
    other.device = Device::Cuda { archs: vec!["sm_90a".into()], min_driver: 580 };
    assert_ne!(identity(other, 0), plain);
}

#[test]
fn floats_in_the_manifest_survive_to_the_last_bit() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("a.engine");
    let mut bits = 0x3ff1_2345_6789_abcdu64;
    for _ in 0..300 {
        bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut manifest = tiny_manifest();
        manifest.model.rope_theta = 1.0 + f64::from_bits(0x40f0_0000_0000_0000 | bits >> 12);
        manifest.model.rms_norm_eps = f32::from_bits(0x3700_0000 | (bits >> 41) as u32);
        seal(&path, manifest.clone(), 0).commit().unwrap();
        assert_eq!(Engine::open(&path).unwrap().manifest().model, manifest.model);
    }
}
