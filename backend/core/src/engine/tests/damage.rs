//! Files that were altered after they were written: each kind of damage with its exact message.

use super::*;
use std::os::unix::fs::FileExt;

/// The message for a file of these bytes, without the path in front and the remedy behind.
fn refusal(bytes: &[u8]) -> String {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("x.engine");
    fs::write(&path, bytes).unwrap();
    let error = open_error(&path);
    let start = format!("engine {}: ", path.display());
    let what = error.strip_prefix(&start).and_then(|rest| rest.strip_suffix(REMEDY));
    what.unwrap_or_else(|| panic!("{error}")).to_string()
}

const REMEDY: &str = ": rebuild with spec-build";

fn damaged(at: usize, bytes: &[u8]) -> String {
    let mut file = tiny_file();
    file[at..at + bytes.len()].copy_from_slice(bytes);
    refusal(&file)
}

fn manifest_of(file: &[u8]) -> Manifest {
    parse_bytes(file).unwrap()
}

#[test]
fn foreign_files_are_named_as_such() {
    assert_eq!(
        refusal(b"PK\x03\x04 and so on"),
        r#"not an engine file: starts with "PK\x03\x04 and", expected "SPECENG\n""#
    );
    assert_eq!(refusal(b""), r#"not an engine file: starts with "", expected "SPECENG\n""#);
    assert_eq!(
        damaged(7, b"\r"),
        r#"not an engine file: starts with "SPECENG\r", expected "SPECENG\n""#
    );
}

#[test]
fn other_format_versions_are_named() {
    assert_eq!(damaged(8, &3u32.to_le_bytes()), "built by format 3, this reads 1");
    assert_eq!(damaged(8, &0u32.to_le_bytes()), "built by format 0, this reads 1");
    // Nothing after the version is looked at: another format may mean something else by it.
    assert_eq!(refusal(b"SPECENG\n\x02\0\0\0"), "built by format 2, this reads 1");
}

#[test]
fn reserved_bytes_must_be_zero() {
    assert_eq!(damaged(13, &[1]), "bytes 12 to 16 hold 256, expected 0");
}

#[test]
fn manifest_length_is_bounded() {
    let limit = 64u64 << 20;
    for len in [0, limit + 1, u64::MAX, u64::MAX - 55, u64::MAX - 255] {
        assert_eq!(
            damaged(16, &len.to_le_bytes()),
            format!("manifest length is {len}, expected 1 to 67108864")
        );
    }
    let len = tiny_file().len();
    assert_eq!(
        damaged(16, &limit.to_le_bytes()),
        format!("ends at byte {len}, its manifest at 67109120")
    );
}

#[test]
fn an_altered_manifest_does_not_match_its_hash() {
    let file = tiny_file();
    let at = file.windows(4).position(|bytes| bytes == b"spec").unwrap();
    let message = damaged(at, b"Spec");
    assert!(message.starts_with("manifest has hash "), "{message}");
    assert!(message.contains(", the header says "), "{message}");
    let message = damaged(24, &[file[24] ^ 1]);
    assert!(message.starts_with("manifest has hash "), "{message}");
}

#[test]
fn padding_must_be_what_it_was() {
    let file = tiny_file();
    let sections = manifest_of(&file).sections;
    let before_first = sections[0].offset as usize - 1;
    assert_eq!(file[before_first], b' ', "the test needs padding here");
    assert_eq!(
        damaged(before_first, &[0]),
        format!("byte {before_first} is padding and holds 0, expected 32")
    );
    for pair in sections.windows(2) {
        let end = pair[0].offset + pair[0].bytes;
        for at in [end, pair[1].offset - 1] {
            if (end..pair[1].offset).contains(&at) {
                assert_eq!(
                    damaged(at as usize, &[9]),
                    format!("byte {at} is padding and holds 9, expected 0")
                );
            }
        }
    }
}

#[test]
fn bytes_after_the_last_section_are_refused() {
    let mut file = tiny_file();
    let len = file.len();
    file.push(0);
    assert_eq!(refusal(&file), format!("ends at byte {}, its sections at {len}", len + 1));
}

#[test]
fn truncation_at_every_length_is_refused() {
    let (_folder, path) = tiny_engine();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    let len = file.metadata().unwrap().len();
    for len in (0..len).rev() {
        file.set_len(len).unwrap();
        let error = open_error(&path);
        let expected = match len {
            0..8 => "not an engine file: starts with ".to_string(),
            8..56 => format!("ends at byte {len}, the header takes 56"),
            _ => format!("ends at byte {len}, its "),
        };
        assert!(error.contains(&expected), "{len}: {error}");
        assert!(error.ends_with(REMEDY) && error.lines().count() == 1, "{len}: {error}");
    }
}

#[test]
fn every_flipped_byte_is_found() {
    let (_folder, path) = tiny_engine();
    let bytes = fs::read(&path).unwrap();
    let sections = manifest_of(&bytes).sections;
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    for (at, byte) in bytes.iter().enumerate() {
        let place = at as u64;
        let section = sections.iter().find(|s| (s.offset..s.offset + s.bytes).contains(&place));
        for mask in [1 << (at % 8), 0xff] {
            file.write_all_at(&[byte ^ mask], place).unwrap();
            match (Engine::open(&path), section) {
                (Err(_), None) => {}
                (Ok(engine), Some(section)) => {
                    let error = engine.verify_hashes(|_| ()).unwrap_err().to_string();
                    let expected = format!(": section `{}` has hash ", section.name);
                    assert!(error.contains(&expected), "byte {at}: {error}");
                    assert!(error.contains(&section.hash) && error.ends_with(REMEDY), "{error}");
                }
                (result, section) => panic!("byte {at} in {section:?}: {result:?}"),
            }
        }
        file.write_all_at(&[*byte], place).unwrap();
    }
    Engine::open(&path).unwrap().verify_hashes(|_| ()).unwrap();
}

#[test]
fn every_single_bit_of_header_and_manifest_counts() {
    let mut file = tiny_file();
    let end = manifest_of(&file).sections[0].offset as usize;
    for bit in 0..end * 8 {
        file[bit / 8] ^= 1 << (bit % 8);
        assert!(parse_bytes(&file).is_err(), "bit {bit}");
        file[bit / 8] ^= 1 << (bit % 8);
    }
}

#[test]
fn what_is_no_file_is_refused_without_waiting() {
    let folder = TempDir::new().unwrap();
    let error = open_error(folder.path());
    assert_eq!(error, format!("{}: not a regular file", folder.path().display()));
    let error = open_error(&folder.path().join("absent"));
    assert!(error.contains("absent: No such file"), "{error}");
}

#[test]
fn engines_for_another_device_name_both_and_the_flag() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("x");
    let open = |manifest| {
        seal(&path, manifest, 0).commit().unwrap();
        Engine::open(&path).unwrap()
    };
    let start = format!("engine {}: ", path.display());
    let text = |error: Option<crate::Error>| {
        error.unwrap().to_string().strip_prefix(&start).unwrap().to_string()
    };
    let cpu = open(tiny_manifest());
    cpu.require_cpu().unwrap();
    assert_eq!(
        text(cpu.require_cuda(8, 9, 580).err()),
        "built for the cpu, opened on a GPU of compute capability 8.9: \
         rebuild with spec-build --device cuda:sm_89"
    );
    let cuda = open(cuda_manifest());
    assert_eq!(
        text(cuda.require_cpu().err()),
        "built for cuda:sm_90a,sm_80, opened on the cpu: rebuild with spec-build --device cpu"
    );
    for (major, minor, arch) in [(9, 0, "sm_90a"), (8, 0, "sm_80"), (8, 9, "sm_80")] {
        assert_eq!(cuda.require_cuda(major, minor, 580).unwrap(), arch);
    }
    assert_eq!(
        text(cuda.require_cuda(12, 0, 580).err()),
        "built for cuda:sm_90a,sm_80, opened on a GPU of compute capability 12.0: \
         rebuild with spec-build --device cuda:sm_120a"
    );
    assert_eq!(
        text(cuda.require_cuda(7, 5, 580).err()),
        "built for cuda:sm_90a,sm_80, opened on a GPU of compute capability 7.5: \
         spec-build compiles for sm_80, sm_89, sm_90a, sm_100a, sm_120a, none of which it runs"
    );
    assert!(cuda.require_cuda(9, 1, 580).is_err(), "sm_90a is for 9.0 alone");
    assert_eq!(
        text(cuda.require_cuda(9, 0, 570).err()),
        "needs driver 580, found 570: update the driver"
    );
}
