//! Instructions alone, in texts written here, against what the PTX ISA says of them; nothing is taken from the kernels.
#![allow(clippy::unwrap_used)]

use half::f16;
use spec_emu_ptx::{Kernel, Launch, Memory, run};

/// Where results are written: 256 bytes a thread, zeros before.
const OUT: u64 = 0x10_0000;
const OUT_BYTES: usize = 256;
/// What instructions read: byte i holds i, and over again.
const IN: u64 = 0x20_0000;
const IN_BYTES: usize = 4096;

/// A text around a body: `%out` is the thread's place for results, `%in` the input, `%t` the thread.
fn text(body: &str) -> String {
    format!(
        ".version 9.0\n.target sm_90a\n.address_size 64\n\
         .extern .shared .align 1024 .b8 dynamic_shared_memory[];\n\
         .visible .entry test(\n.param .align 8 .b8 test_param_0[16]\n)\n{{\n\
         .reg .pred %p<10>;\n.reg .b16 %rs<20>;\n.reg .b32 %r<40>;\n.reg .b32 %t;\n.reg .f32 %f<20>;\n\
         .reg .b64 %rd<20>;\n.reg .b64 %out;\n.reg .b64 %in;\n\
         mov.u32 %t, %tid.x;\nld.param.u64 %out, [test_param_0];\nld.param.u64 %in, [test_param_0+8];\n\
         mul.wide.u32 %rd0, %t, {OUT_BYTES};\nadd.s64 %out, %out, %rd0;\n{body}\nret;\n}}\n"
    )
}

/// Runs a body by some threads; their words of results, or the error.
fn words(body: &str, num_threads: u32, seed: u64) -> Result<Vec<Vec<u32>>, String> {
    let kernel = Kernel::parse(&text(body))?;
    let mut memory = Memory::default();
    memory.put(OUT, vec![0; OUT_BYTES * num_threads as usize]);
    memory.put(IN, (0..IN_BYTES).map(|i| i as u8).collect());
    let params = [OUT.to_le_bytes(), IN.to_le_bytes()].concat();
    let launch = Launch { grid: 1, block: num_threads, shared_bytes: 4096, params: &params, seed };
    run(&kernel, &launch, &mut memory)?;
    let out = memory.slice(OUT, OUT_BYTES * num_threads as usize)?;
    let word = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes);
    Ok(out.chunks(OUT_BYTES).map(|out| out.as_chunks().0.iter().map(word).collect()).collect())
}

fn warp(body: &str) -> Vec<Vec<u32>> {
    words(body, 32, 0).unwrap_or_else(|error| panic!("{error}"))
}

/// The first word of the first thread.
fn one(body: &str) -> u32 {
    warp(body)[0][0]
}

fn error(body: &str, num_threads: u32) -> String {
    words(body, num_threads, 0).expect_err("is refused")
}

/// The first of `%f1` and `%f2` is the upper byte.
fn pack_e4m3(first: f32, second: f32) -> u32 {
    one(&format!(
        "mov.f32 %f1, 0f{:08X}; mov.f32 %f2, 0f{:08X}; cvt.rn.satfinite.e4m3x2.f32 %rs1, %f1, %f2;\n\
         cvt.u32.u16 %r1, %rs1; st.global.u32 [%out], %r1;",
        first.to_bits(),
        second.to_bits()
    ))
}

#[test]
fn the_first_operand_of_a_pair_of_e4m3_is_the_upper_byte() {
    // 1 has the biased exponent 7, and 1.75 six eighths more.
    assert_eq!(pack_e4m3(1.0, 1.75), 0x383e);
    assert_eq!(pack_e4m3(0.0, -2.0), 0x00c0);
}

#[test]
fn e4m3_rounds_to_even_and_stays_finite() {
    for (value, code) in [
        (448.0, 0x7e),
        (1e9, 0x7e),
        (f32::NEG_INFINITY, 0xfe),
        (f32::NAN, 0x7f),
        // Between 1 and 1.125, and between that and 1.25.
        (1.0625, 0x38),
        (1.1875, 0x3a),
        // The least subnormal is 2^-9; half of it is a tie with zero.
        (1.0 / 512.0, 0x01),
        (1.0 / 1024.0, 0x00),
        (1.5 / 512.0, 0x02),
        (-0.0, 0x80),
        // Rounds up to the next power of two.
        (1.97, 0x40),
    ] {
        assert_eq!(pack_e4m3(0.0, value) & 0xff, code, "{value}");
    }
}

#[test]
fn the_lower_byte_of_a_pair_of_e4m3_is_the_lower_half() {
    let halves = |pair: u32| {
        one(&format!(
            "mov.u16 %rs1, {pair}; cvt.rn.f16x2.e4m3x2 %r1, %rs1; st.global.u32 [%out], %r1;"
        ))
    };
    let of = |low: f32, high: f32| {
        u32::from(f16::from_f32(low).to_bits()) | u32::from(f16::from_f32(high).to_bits()) << 16
    };
    assert_eq!(halves(0x38c0), of(-2.0, 1.0));
    assert_eq!(halves(0x7e01), of(1.0 / 512.0, 448.0));
    assert_eq!(halves(0x7f00), 0x7fff_0000);
}

#[test]
fn conversions_to_halves_round_to_even_and_overflow_to_infinity() {
    let half = |value: f32| {
        let bits = value.to_bits();
        one(&format!(
            "mov.f32 %f1, 0f{bits:08X}; cvt.rn.f16.f32 %rs1, %f1; cvt.u32.u16 %r1, %rs1;\n\
             st.global.u32 [%out], %r1;"
        ))
    };
    assert_eq!(half(1.0 + 1.0 / 2048.0), 0x3c00);
    assert_eq!(half(1.0 + 3.0 / 2048.0), 0x3c02);
    assert_eq!(half(65519.0), 0x7bff);
    assert_eq!(half(65520.0), 0x7c00);
    assert_eq!(half(f32::NAN), 0x7fff);
    assert_eq!(half(f32::from_bits(0x3380_0000)), 0x0001);
}

#[test]
fn powers_of_two_flush_subnormals() {
    let power = |value: f32| {
        let bits = value.to_bits();
        one(&format!(
            "mov.f32 %f1, 0f{bits:08X}; ex2.approx.ftz.f32 %f2, %f1; st.global.f32 [%out], %f2;"
        ))
    };
    assert_eq!(power(3.0), 8f32.to_bits());
    assert_eq!(power(-126.0), f32::MIN_POSITIVE.to_bits());
    assert_eq!(power(-126.5), 0);
    assert_eq!(power(f32::NEG_INFINITY), 0);
    assert_eq!(power(128.0), f32::INFINITY.to_bits());
}

#[test]
fn reciprocals_flush_subnormals() {
    let reciprocal = |value: f32| {
        let bits = value.to_bits();
        one(&format!(
            "mov.f32 %f1, 0f{bits:08X}; rcp.approx.ftz.f32 %f2, %f1; st.global.f32 [%out], %f2;"
        ))
    };
    assert_eq!(reciprocal(3.0), (1.0f32 / 3.0).to_bits());
    assert_eq!(reciprocal(f32::INFINITY), 0);
    assert_eq!(reciprocal(-f32::MAX), (-0.0f32).to_bits());
    assert_eq!(reciprocal(f32::from_bits(1)), f32::INFINITY.to_bits());
    assert_eq!(reciprocal(-0.0), f32::NEG_INFINITY.to_bits());
}

#[test]
fn integers_shift_insert_and_permute() {
    assert_eq!(one("shl.b32 %r1, 1, 32; st.global.u32 [%out], %r1;"), 0);
    assert_eq!(one("shr.s32 %r1, -8, 40; st.global.u32 [%out], %r1;"), u32::MAX);
    assert_eq!(one("bfi.b32 %r1, 0xff, 0x12345678, 8, 4; st.global.u32 [%out], %r1;"), 0x1234_5f78);
    // Bytes of the second operand are 4 to 7; 8 more repeats a sign.
    let permuted = "prmt.b32 %r1, 0x03020180, 0x07060504, 0x8047; st.global.u32 [%out], %r1;";
    assert_eq!(one(permuted), 0xff80_0407);
    let turned = "shf.l.wrap.b32 %r1, 0x80000001, 0x40000002, 33; st.global.u32 [%out], %r1;";
    assert_eq!(one(turned), 0x8000_0005);
}

#[test]
fn comparisons_with_what_is_no_number() {
    for (condition, expected) in [("lt", 0), ("ge", 0), ("neu", 1), ("ltu", 1), ("leu", 1)] {
        let body = format!(
            "setp.{condition}.f32 %p1, 0f7FC00000, 0f3F800000; selp.u32 %r1, 1, 0, %p1;\n\
             st.global.u32 [%out], %r1;"
        );
        assert_eq!(one(&body), expected, "{condition}");
    }
    let body = "max.f32 %f1, 0f7FC00000, 0fBF800000; st.global.f32 [%out], %f1;";
    assert_eq!(one(body), (-1f32).to_bits());
}

#[test]
fn shuffles_read_the_lanes_that_they_name() {
    let shuffled = |mode: &str, by: u32, clamp: u32| -> Vec<(u32, u32)> {
        let body = format!(
            "add.s32 %r1, %t, 100; shfl.sync.{mode}.b32 %r2|%p1, %r1, {by}, {clamp}, -1;\n\
             selp.u32 %r3, 1, 0, %p1; st.global.v2.u32 [%out], {{%r2, %r3}};"
        );
        warp(&body).iter().map(|words| (words[0] - 100, words[1])).collect()
    };
    for lane in 0..32 {
        let at = lane as usize;
        assert_eq!(shuffled("bfly", 5, 31)[at], (lane ^ 5, 1));
        assert_eq!(shuffled("idx", 9, 31)[at], (9, 1));
        assert_eq!(shuffled("up", 4, 0)[at], if lane < 4 { (lane, 0) } else { (lane - 4, 1) });
    }
}

#[test]
fn ballots_have_a_bit_a_lane() {
    let body = "and.b32 %r1, %t, 4; setp.ne.s32 %p1, %r1, 0; vote.sync.ballot.b32 %r2, %p1, -1;\n\
                st.global.u32 [%out], %r2;";
    assert!(warp(body).iter().all(|words| words[0] == 0xf0f0_f0f0));
}

/// Puts the input's first bytes into shared memory, 128 a warp's thread.
const FILL: &str = "mov.u32 %r10, dynamic_shared_memory; mul.lo.s32 %r11, %t, 16; add.s32 %r11, %r10, %r11;\n\
    cvt.u64.u32 %rd1, %t; shl.b64 %rd1, %rd1, 4; add.s64 %rd1, %in, %rd1;\n\
    ld.global.v4.u32 {%r12, %r13, %r14, %r15}, [%rd1];\n\
    st.shared.v4.u32 [%r11], {%r12, %r13, %r14, %r15}; bar.sync 0;\n";

#[test]
fn matrices_are_spread_over_lanes() {
    // Lane i names the 16 bytes from 16 i on.
    let body = format!(
        "{FILL} ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r1, %r2, %r3, %r4}}, [%r11];\n\
         st.global.v4.u32 [%out], {{%r1, %r2, %r3, %r4}};"
    );
    for (lane, words) in warp(&body).iter().enumerate() {
        for (matrix, &word) in words[..4].iter().enumerate() {
            // Row lane / 4 of the matrix has eight elements of two bytes; the lane has two of them.
            let first = 128 * matrix + 16 * (lane / 4) + 4 * (lane % 4);
            let expected: [u8; 4] = std::array::from_fn(|i| (first + i) as u8);
            assert_eq!(word, u32::from_le_bytes(expected), "lane {lane}, matrix {matrix}");
        }
    }
}

/// Elements of A of a lane: row and column of a0 to a7, as the document's table for m16n8k16 has them.
fn place_of_a(lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane & 3);
    let row = if (0..2).contains(&i) || (4..6).contains(&i) { group } else { group + 8 };
    let column = thread * 2 + (i & 1);
    (row, if i < 4 { column } else { column + 8 })
}

/// Elements of B of a lane: row and column of b0 to b3.
fn place_of_b(lane: usize, i: usize) -> (usize, usize) {
    let row = (lane & 3) * 2 + (i & 1);
    (if i < 2 { row } else { row + 8 }, lane >> 2)
}

/// Elements of C and D of a lane: row and column of c0 to c3.
fn place_of_c(lane: usize, i: usize) -> (usize, usize) {
    let row = if i < 2 { lane >> 2 } else { (lane >> 2) + 8 };
    (row, (lane & 3) * 2 + (i & 1))
}

#[test]
fn products_of_matrices_have_the_layout_of_the_document() {
    let a = |row: usize, column: usize| (row * 16 + column) as f32 - 99.0;
    let b = |row: usize, column: usize| (row * 3 + column * column) as f32 - 17.0;
    let c = |row: usize, column: usize| (row * 8 + column) as f32 * 0.5;
    // Whole numbers, whose sums are exact in any order.
    let expected = |row: usize, column: usize| {
        (0..16).map(|k| a(row, k) * b(k, column)).sum::<f32>() + c(row, column)
    };
    let half = |value: f32| f16::from_f32(value).to_bits().to_le_bytes();
    let mut input = Vec::new();
    for lane in 0..32 {
        input.extend((0..8).flat_map(|i| half(a(place_of_a(lane, i).0, place_of_a(lane, i).1))));
        input.extend((0..4).flat_map(|i| half(b(place_of_b(lane, i).0, place_of_b(lane, i).1))));
        let c = |i| c(place_of_c(lane, i).0, place_of_c(lane, i).1).to_le_bytes();
        input.extend((0..4).flat_map(c));
        input.resize(64 * (lane + 1), 0);
    }
    let body = "cvt.u64.u32 %rd1, %t; shl.b64 %rd1, %rd1, 6; add.s64 %rd1, %in, %rd1;\n\
        ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1]; ld.global.v2.u32 {%r5, %r6}, [%rd1+16];\n\
        ld.global.v2.f32 {%f1, %f2}, [%rd1+24]; ld.global.v2.f32 {%f3, %f4}, [%rd1+32];\n\
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4},\n\
        {%r5, %r6}, {%f1, %f2, %f3, %f4}; st.global.v4.f32 [%out], {%f1, %f2, %f3, %f4};";
    let kernel = Kernel::parse(&text(body)).unwrap();
    let mut memory = Memory::default();
    memory.put(OUT, vec![0; OUT_BYTES * 32]);
    memory.put(IN, input);
    let params = [OUT.to_le_bytes(), IN.to_le_bytes()].concat();
    let launch = Launch { grid: 1, block: 32, shared_bytes: 0, params: &params, seed: 0 };
    run(&kernel, &launch, &mut memory).unwrap();
    for lane in 0..32 {
        let out = memory.slice(OUT + (OUT_BYTES * lane) as u64, 16).unwrap();
        for (i, found) in out.as_chunks::<4>().0.iter().enumerate() {
            let (row, column) = place_of_c(lane, i);
            assert_eq!(f32::from_le_bytes(*found), expected(row, column), "({row}, {column})");
        }
    }
}

/// A product of 64 rows and 8 columns of a warpgroup, both operands in shared memory; `before` and `behind` it.
fn warpgroup_product(before: &str, behind: &str) -> Result<Vec<Vec<u32>>, String> {
    // Thread t stores the halves t / 2 + 8 * (t % 2), 1, 1, ... as half a row of a: 16 elements of 64 rows in atoms of 1024
    // bytes, chunk c of row r at c ^ r. Behind them is b, of which the first 16 threads store ones and a row's number.
    let body = format!(
        "mov.u32 %r1, dynamic_shared_memory; shr.u32 %r2, %t, 1; and.b32 %r3, %t, 1;\n\
         and.b32 %r4, %r2, 7; xor.b32 %r5, %r3, %r4; shl.b32 %r5, %r5, 4; shl.b32 %r6, %r2, 7;\n\
         add.s32 %r6, %r6, %r5; add.s32 %r6, %r6, %r1;\n\
         cvt.rn.f32.u32 %f1, %r2; cvt.rn.f16.f32 %rs1, %f1; mov.u16 %rs2, 15360; mov.b32 %r7, {{%rs1, %rs2}};\n\
         mov.b32 %r8, {{%rs2, %rs2}}; st.shared.v4.u32 [%r6], {{%r7, %r8, %r8, %r8}};\n\
         setp.ge.u32 %p1, %t, 16; @%p1 bra $L__1;\n\
         st.shared.v4.u32 [%r6+8192], {{%r7, %r8, %r8, %r8}};\n$L__1:\n\
         {before}\nbar.sync 0;\n\
         mov.f32 %f2, 0f00000000; mov.f32 %f3, 0f3F000000; mov.f32 %f4, %f2; mov.f32 %f5, %f3;\n\
         and.b32 %r10, %r1, 262143; shr.u32 %r10, %r10, 4; cvt.u64.u32 %rd1, %r10;\n\
         or.b64 %rd1, %rd1, 4611686293305360384; add.s64 %rd2, %rd1, 512;\n\
         wgmma.fence.sync.aligned; setp.ne.b32 %p2, 1, 0;\n\
         wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%f2, %f3, %f4, %f5}}, %rd1, %rd2, %p2, 1, 1, 0, 0;\n\
         {behind}\n st.global.v4.f32 [%out], {{%f2, %f3, %f4, %f5}};"
    );
    let kernel = Kernel::parse(&text(&body))?;
    let mut memory = Memory::default();
    memory.put(OUT, vec![0; OUT_BYTES * 128]);
    memory.put(IN, vec![0; IN_BYTES]);
    let params = [OUT.to_le_bytes(), IN.to_le_bytes()].concat();
    let launch = Launch { grid: 1, block: 128, shared_bytes: 9216, params: &params, seed: 0 };
    run(&kernel, &launch, &mut memory)?;
    let out = memory.slice(OUT, OUT_BYTES * 128)?;
    let word = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes);
    Ok(out.chunks(OUT_BYTES).map(|out| out.as_chunks().0.iter().map(word).collect()).collect())
}

const FENCE: &str = "fence.proxy.async.shared::cta;";
const COMMIT_AND_WAIT: &str = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;";

#[test]
fn products_of_warpgroups_have_the_layout_of_the_document() {
    let found = warpgroup_product(FENCE, COMMIT_AND_WAIT).unwrap();
    for (thread, words) in found.iter().enumerate() {
        let (warp, lane) = (thread / 32, thread % 32);
        for (i, &word) in words[..4].iter().enumerate() {
            let row = 16 * warp + lane / 4 + i / 2 * 8;
            let column = lane % 4 * 2 + i % 2;
            // Both halves of a row begin with its number, and go on with ones.
            let expected = 2.0 * (row * column) as f32 + 14.0 + 0.5 * (i % 2) as f32;
            assert_eq!(f32::from_bits(word), expected, "row {row}, column {column}");
        }
    }
}

#[test]
fn products_of_warpgroups_want_fences_commits_and_waits() {
    let refused = |before, behind| warpgroup_product(before, behind).unwrap_err();
    let unseen = refused("", COMMIT_AND_WAIT);
    assert!(unseen.contains("a store has no fence.proxy.async behind it"), "{unseen}");
    let left = refused(FENCE, "wgmma.commit_group.sync.aligned;");
    assert!(left.contains("ends before 1 of its products"), "{left}");
    let open = refused(FENCE, "wgmma.wait_group.sync.aligned 0;");
    assert!(open.contains("ends before 1 of its products"), "{open}");
    // Sums that are read too early are those of before.
    let early = format!("mov.f32 %f9, %f2; {COMMIT_AND_WAIT} mov.f32 %f2, %f9;");
    assert_eq!(warpgroup_product(FENCE, &early).unwrap()[5][0], 0);
    // A warp whose lanes have not fenced reads what they have stored themselves.
    let torn =
        format!("setp.lt.u32 %p3, %t, 96; @%p3 bra $L__2; bra $L__3;\n$L__2:\n{FENCE}\n$L__3:");
    let unseen = refused(&torn, COMMIT_AND_WAIT);
    assert!(unseen.contains("a store has no fence.proxy.async"), "{unseen}");
}

#[test]
fn copies_arrive_no_earlier_than_they_are_waited_for() {
    let body = |pending: u32| {
        format!(
            "mov.u32 %r10, dynamic_shared_memory; mul.lo.s32 %r11, %t, 32; add.s32 %r11, %r10, %r11;\n\
             mov.u32 %r1, 7; st.shared.u32 [%r11], %r1; st.shared.u32 [%r11+16], %r1;\n\
             cp.async.cg.shared.global [%r11], [%in], 16; cp.async.commit_group;\n\
             add.s32 %r12, %r11, 16; cp.async.cg.shared.global [%r12], [%in], 16, 4;\n\
             cp.async.commit_group; cp.async.wait_group {pending};\n\
             ld.shared.u32 %r2, [%r11]; ld.shared.u32 %r3, [%r11+16]; ld.shared.u32 %r4, [%r11+20];\n\
             st.global.u32 [%out], %r2; st.global.v2.u32 [%out+8], {{%r3, %r4}};"
        )
    };
    let first = |pending| warp(&body(pending))[3][..4].to_vec();
    let arrived = 0x0302_0100;
    // What a copy does not read it writes as zeros.
    assert_eq!(first(0), [arrived, 0, arrived, 0]);
    assert_eq!(first(1)[..3], [arrived, 0, 7]);
    assert_eq!(first(2)[..3], [7, 0, 7]);
}

/// A barrier of one arrival and 32 bytes, that thread 0 of 64 arms and all wait for.
fn bulk(bytes: u32, count: u32) -> String {
    format!(
        "mov.u32 %r10, dynamic_shared_memory; setp.ne.s32 %p1, %t, 0; @%p1 bra $L_wait;\n\
         mbarrier.init.shared.b64 [%r10], {count}; fence.mbarrier_init.release.cluster;\n\
         {{ .reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [%r10], {bytes}; }}\n\
         add.s32 %r11, %r10, 64;\n\
         {{ .reg .b64 p; createpolicy.fractional.L2::evict_first.b64 p, 1.0;\n\
         cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%r11], [%in],\n\
         32, [%r10], p; }}\n\
         $L_wait: bar.sync 0;\n\
         $L_again: mbarrier.try_wait.parity.shared.b64 %p2, [%r10], 0; @!%p2 bra $L_again;\n\
         ld.shared.u32 %r1, [%r10+92]; st.global.u32 [%out], %r1;"
    )
}

#[test]
fn bulk_copies_complete_a_phase() {
    for seed in 0..20 {
        let found = words(&bulk(32, 1), 64, seed).unwrap();
        assert!(found.iter().all(|words| words[0] == 0x1f1e_1d1c), "seed {seed}");
    }
    for (bytes, count) in [(48, 1), (32, 2)] {
        let error = error(&bulk(bytes, count), 64);
        assert!(error.contains("all wait") && error.contains("$L_again"), "{error}");
    }
}

#[test]
fn arrivals_behind_copies_are_counted_or_come_on_top() {
    let body = |kind: &str| {
        format!(
            "mov.u32 %r10, dynamic_shared_memory; setp.ne.s32 %p1, %t, 0; @%p1 bra $L_go;\n\
             mbarrier.init.shared.b64 [%r10], 32;\n\
             $L_go: bar.sync 0; mul.lo.s32 %r11, %t, 16; add.s32 %r11, %r11, %r10; add.s32 %r11, %r11, 64;\n\
             cp.async.cg.shared.global [%r11], [%in], 16;\n\
             cp.async.mbarrier.arrive{kind}.shared.b64 [%r10];\n\
             $L_again: mbarrier.test_wait.parity.shared.b64 %p2, [%r10], 0; @!%p2 bra $L_again;\n\
             ld.shared.u32 %r1, [%r10+560]; st.global.u32 [%out], %r1;"
        )
    };
    for seed in 0..5 {
        let found = words(&body(".noinc"), 32, seed).unwrap();
        assert!(found.iter().all(|words| words[0] == 0x0302_0100), "seed {seed}");
    }
    assert!(error(&body(""), 32).contains("all wait"));
}

#[test]
fn barriers_wait_for_their_threads() {
    // The second warp writes, the first reads what it wrote.
    let body = "mov.u32 %r10, dynamic_shared_memory; setp.lt.u32 %p1, %t, 32; @%p1 bra $L_read;\n\
        mov.u32 %r1, 5; st.shared.u32 [%r10], %r1;\n\
        $L_read: bar.sync 1, 64; ld.shared.u32 %r2, [%r10]; st.global.u32 [%out], %r2;";
    assert!(words(body, 64, 0).unwrap().iter().all(|words| words[0] == 5));
    assert!(error("bar.sync 1, 64;", 32).contains("all wait"));
    let apart =
        "setp.lt.u32 %p1, %t, 7; @%p1 bra $L_end; bar.warp.sync -1;\n$L_end: mov.u32 %r1, 0;";
    assert!(error(apart, 32).contains("25 threads"), "{}", error(apart, 32));
}

#[test]
fn atomics_return_what_was_there() {
    let body = "atom.acq_rel.gpu.global.add.u32 %r1, [%in], 2; st.global.u32 [%out], %r1;";
    let mut olds: Vec<u32> = warp(body).iter().map(|words| words[0]).collect();
    olds.sort_unstable();
    assert_eq!(olds, (0..32).map(|i| 0x0302_0100 + 2 * i).collect::<Vec<_>>());
}

#[test]
fn what_is_wrong_is_refused_with_its_line() {
    for (body, expected) in [
        ("tanh.approx.f32 %f1, %f1;", "tanh.approx.f32 is not supported"),
        ("add.s32 %r1, %r99, 1;", "no register is called %r99"),
        ("ld.global.s8 %r1, [%in];", "not supported"),
        ("bra $L_none;", "no label $L_none"),
        ("ld.global.u32 %r1, [%in+4096];", "in no allocation"),
        ("ld.global.v2.u32 {%r1, %r2}, [%in+4];", "is not aligned"),
        ("mov.u32 %r1, 0; ld.shared.u32 %r2, [%r1];", "of shared memory"),
        ("$L_a: bra $L_a;", "no end after"),
    ] {
        let error = error(body, 32);
        assert!(error.contains(expected), "{body}: {error}");
        assert!(error.contains("line") || error.contains("label"), "{body}: {error}");
    }
}
