//! Archives and pickles as torch writes them, and as somebody would who means harm.

use super::Stored;
use proptest::prelude::*;
use std::fs;
use std::os::unix::fs::FileExt;

/// A ZIP archive of members that lie in it as they are.
fn archive(members: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut bytes, mut directory) = (Vec::new(), Vec::new());
    for (name, data) in members {
        let header = bytes.len() as u32;
        let len = (data.len() as u32).to_le_bytes();
        let name_len = (name.len() as u16).to_le_bytes();
        // Version, flags, method, time, date, check sum; sizes; lengths of the name and of what is beside it.
        let common = [&[0; 14][..], &len, &len, &name_len, &[0, 0]].concat();
        bytes.extend([b"PK\x03\x04", &common[..], name.as_bytes(), data].concat());
        let rest = [&[0; 10][..], &header.to_le_bytes()].concat();
        directory.extend([&b"PK\x01\x02\x14\0"[..], &common[..], &rest, name.as_bytes()].concat());
    }
    let (len, offset) = (directory.len() as u32, bytes.len() as u32);
    bytes.extend(directory);
    bytes.extend([b"PK\x05\x06", &[0; 8][..], &len.to_le_bytes(), &offset.to_le_bytes()].concat());
    bytes.extend([0, 0]);
    bytes
}

fn text(text: &str) -> Vec<u8> {
    [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat()
}

fn global(module: &str, name: &str) -> Vec<u8> {
    format!("c{module}\n{name}\n").into_bytes()
}

fn number(value: i32) -> Vec<u8> {
    [b"J", &value.to_le_bytes()[..]].concat()
}

fn tuple(values: &[i32]) -> Vec<u8> {
    let values = values.iter().flat_map(|&value| number(value));
    [b"(".to_vec(), values.collect(), b"t".to_vec()].concat()
}

fn storage(class: &str, key: &str) -> Vec<u8> {
    let parts = [text("storage"), global("torch", class), text(key), text("cpu"), number(4)];
    [b"(".to_vec(), parts.concat(), b"tQ".to_vec()].concat()
}

/// A tensor of f32 in the storage `0`.
fn tensor(first: i32, shape: &[i32], strides: &[i32]) -> Vec<u8> {
    let storage = storage("FloatStorage", "0");
    let parts = [storage, number(first), tuple(shape), tuple(strides), b"\x89".to_vec()];
    let hooks = [global("collections", "OrderedDict"), b")R".to_vec()].concat();
    let function = global("torch._utils", "_rebuild_tensor_v2");
    [function, b"(".to_vec(), parts.concat(), hooks, b"tR".to_vec()].concat()
}

/// A dictionary of such values, as torch writes the state of a module.
fn state(items: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let items = items.iter().flat_map(|(name, value)| [text(name), value.clone()].concat());
    let made = [b"\x80\x02".to_vec(), global("collections", "OrderedDict"), b")R(".to_vec()];
    let attributes = [b"}".to_vec(), text("_metadata"), b"}sb.".to_vec()].concat();
    [made.concat(), items.collect(), b"u".to_vec(), attributes].concat()
}

const VALUES: [f32; 8] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];

fn saved(pickle: &[u8]) -> Vec<u8> {
    let values: Vec<u8> = VALUES.iter().flat_map(|value| value.to_le_bytes()).collect();
    archive(&[
        ("model/data.pkl", pickle),
        ("model/byteorder", b"little"),
        ("model/data/0", &values),
        ("model/version", b"3\n"),
    ])
}

fn open(bytes: &[u8]) -> anyhow::Result<Vec<Stored>> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pytorch_model.bin");
    fs::write(&path, bytes).unwrap();
    super::open(&path)
}

#[track_caller]
fn refused(bytes: &[u8], parts: &[&str]) {
    let message = format!("{:#}", open(bytes).expect_err("it was accepted"));
    for part in parts.iter().chain(&["pytorch_model.bin"]) {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

fn floats(stored: &Stored) -> Vec<f32> {
    let mut bytes = vec![0; 4 * stored.shape.iter().product::<usize>()];
    stored.file.read_exact_at(&mut bytes, stored.offset).unwrap();
    bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

#[test]
fn tensors_are_where_their_storage_is() {
    let parameter = |tensor: Vec<u8>| {
        let function = global("torch._utils", "_rebuild_parameter");
        [function, b"(".to_vec(), tensor, b"\x88}tR".to_vec()].concat()
    };
    let stored = open(&saved(&state(&[
        ("whole", tensor(0, &[2, 4], &[4, 1])),
        ("rows", tensor(4, &[1, 3], &[9, 1])),
        ("parameter", parameter(tensor(1, &[2], &[1]))),
        ("scalar", tensor(7, &[], &[])),
    ])))
    .unwrap();
    let found: Vec<_> = stored.iter().map(|s| (&*s.name, &*s.dtype, &s.shape[..])).collect();
    let names = ["whole", "rows", "parameter", "scalar"];
    let shapes: [&[usize]; 4] = [&[2, 4], &[1, 3], &[2], &[]];
    assert_eq!(
        found,
        names.into_iter().zip(shapes).map(|(n, s)| (n, "F32", s)).collect::<Vec<_>>()
    );
    assert_eq!(floats(&stored[0]), VALUES);
    assert_eq!(floats(&stored[1]), VALUES[4..7]);
    assert_eq!(floats(&stored[2]), VALUES[1..3]);
    assert_eq!(floats(&stored[3]), VALUES[7..]);
}

#[test]
fn what_would_run_something_is_refused_by_name() {
    let call = |module, name, args: &[u8]| {
        let call = [global(module, name), b"(".to_vec(), args.to_vec(), b"tR".to_vec()].concat();
        saved(&state(&[("weight", call)]))
    };
    refused(&call("os", "system", &text("true")), &["it calls `os.system` with 1 arguments"]);
    refused(&call("builtins", "eval", &text("1")), &["`builtins.eval`"]);
    // The right name, and what does not belong to it.
    let parts = [text("x"), number(0), tuple(&[1]), tuple(&[1])].concat();
    refused(&call("torch._utils", "_rebuild_tensor_v2", &parts), &["_rebuild_tensor_v2` with 4"]);
    // The same without a call: an object made with its class, and its state put in.
    let made = [global("a", "B"), b")\x81".to_vec()].concat();
    refused(&saved(&state(&[("weight", made)])), &["instruction 0x81"]);
    let built = [global("a", "B"), b"}b".to_vec()].concat();
    refused(&saved(&state(&[("weight", built)])), &["not a dictionary"]);
}

#[test]
fn what_is_no_dictionary_of_tensors_is_refused() {
    refused(&saved(b"\x80\x02K\x01."), &["a whole number, expected a dictionary of tensors"]);
    refused(&saved(&state(&[("step", number(3))])), &["`step` is a whole number"]);
    refused(&saved(&state(&[("inner", b"}".to_vec())])), &["`inner` is a dictionary"]);
    let twice = [("w", tensor(0, &[1], &[1])), ("w", tensor(1, &[1], &[1]))];
    refused(&saved(&state(&twice)), &["tensor `w` appears twice"]);
    refused(&saved(b"\x80\x09}."), &["protocol 9"]);
    refused(&saved(b"\x80\x02}"), &["at byte 3", "ends too early"]);
}

#[test]
fn tensors_that_are_not_in_their_storage_are_refused() {
    for (first, shape, strides, part) in [
        (1, &[2, 4][..], &[4, 1][..], "its storage has 8 values"),
        (0, &[i32::MAX; 4], &[1; 4], "in steps of"),
        (i32::MAX, &[1], &[1], "its storage has 8 values"),
        (0, &[2, 2], &[1, 2], "its shape [2, 2] lies in steps of [1, 2]"),
        (0, &[2], &[], "in steps of"),
        (-1, &[1], &[1], "found -1"),
        (0, &[-1], &[1], "found -1"),
        (0, &[1; 9], &[1; 9], "9 dimensions"),
    ] {
        refused(&saved(&state(&[("weight", tensor(first, shape, strides))])), &[part]);
    }
    let of = |class, key| {
        let function = global("torch._utils", "_rebuild_tensor_v2");
        let parts = [storage(class, key), number(0), tuple(&[1]), tuple(&[1])].concat();
        saved(&state(&[("w", [function, b"(".to_vec(), parts, b"tR".to_vec()].concat())]))
    };
    refused(&of("FloatStorage", "1"), &["tensor `w`", "no file `model/data/1`"]);
    refused(&of("FloatStorage", "../../0"), &["no file"]);
    refused(&of("QInt8Storage", "0"), &["tensor `w`", "`QInt8Storage`"]);
}

#[test]
fn what_names_itself_again_and_again_takes_no_memory() {
    // One name for a million tensors; a text of 1 MB as a name, and as a module's.
    let named = |name: &str| {
        let first = [b"\x80\x02}(".to_vec(), text(name), b"q\x00K\x01".to_vec()].concat();
        saved(&[first, b"h\x00K\x01".repeat(1 << 20), b"u.".to_vec()].concat())
    };
    refused(&named(&"n".repeat(1000)), &["appears twice"]);
    refused(&named(&"n".repeat(1 << 20)), &["a name of 1048576 bytes"]);
    let long = [b"(".to_vec(), text(&"n".repeat(1 << 20)), b"q\x00".to_vec()].concat();
    let module = [b"\x80\x02".to_vec(), long, b"h\x00h\x00\x93.".to_vec()].concat();
    refused(&saved(&module), &["a name of 2097152 bytes"]);
    // Tuples of twice the same, one in the other.
    let nested = [b"\x80\x02)".to_vec(), b"q\x00h\x00\x86".repeat(40), b".".to_vec()].concat();
    refused(&saved(&nested), &["tuples in 9 tuples"]);
}

#[test]
fn archives_that_are_none_are_refused() {
    refused(b"", &["no ZIP archive"]);
    refused(&b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.".repeat(9), &["PyTorch before 1.6"]);
    let pickle = state(&[("w", tensor(0, &[1], &[1]))]);
    refused(&archive(&[("model/data/0", b"")]), &["no file `data.pkl`"]);
    refused(&archive(&[("model/otherdata.pkl", b"")]), &["no file `data.pkl`"]);
    let long = vec![b'N'; (16 << 20) + 1];
    refused(&archive(&[("model/data.pkl", &long)]), &["16777217 bytes, expected at most 16777216"]);
    refused(
        &archive(&[("a/data.pkl", &pickle), ("b/data.pkl", &pickle)]),
        &["more than one file `data.pkl`"],
    );
    refused(&archive(&[("a/data.pkl", b"."), ("a/data.pkl", b".")]), &["two files `a/data.pkl`"]);
    let big = archive(&[("m/data.pkl", &pickle), ("m/byteorder", b"big"), ("m/data/0", &[0; 4])]);
    refused(&big, &["`big` endian"]);
    let mut packed = saved(&pickle);
    let entry = packed.windows(4).position(|bytes| bytes == b"PK\x01\x02").unwrap();
    packed[entry + 10] = 8;
    refused(&packed, &["`model/data.pkl` is compressed"]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn cut_or_altered_files_never_panic(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<prop::sample::Index>(), is_cut in any::<bool>(),
    ) {
        let items = [("whole", tensor(0, &[2, 4], &[4, 1])), ("rows", tensor(4, &[1, 3], &[3, 1]))];
        let mut bytes = saved(&state(&items));
        flips.iter().for_each(|(at, byte)| *at.get_mut(&mut bytes) = *byte);
        if is_cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        for stored in open(&bytes).unwrap_or_default() {
            prop_assert!(stored.offset <= bytes.len() as u64);
        }
    }

    #[test]
    fn any_program_ends(program in prop::collection::vec(
        prop_oneof![
            Just(b'('), Just(b't'), Just(b')'), Just(b'}'), Just(b'u'), Just(b's'), Just(b'R'), Just(b'Q'),
            Just(b'h'), Just(b'q'), Just(b'b'), Just(b'0'), Just(b'.'), Just(0x85), Just(0x87), Just(0x94), any::<u8>(),
        ], 0..200)) {
        let _ = super::pickle::run(&program);
    }
}
