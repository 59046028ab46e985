//! What the blocks of a cluster do with each other, in texts written here, against what the PTX ISA says of it.
#![allow(clippy::unwrap_used)]

use spec_emu_ptx::{Kernel, Launch, Memory, run};

/// Where results are written: 16 bytes a thread, zeros before.
const OUT: u64 = 0x10_0000;
const OUT_BYTES: usize = 16;
/// What instructions read: byte i holds i, and over again.
const IN: u64 = 0x20_0000;
const IN_BYTES: usize = 4096;

const PAIRS: &str = ".explicitcluster\n.reqnctapercluster 2, 1, 1\n";
const SEEDS: std::ops::Range<u64> = 0..20;

/// A text around a body: `%out` is the thread's place for results, `%in` the input, `%t` the thread, `%c` the block's rank,
/// `%s` shared memory, and `%p0` whether the thread is the first of its block.
fn text(directives: &str, body: &str) -> String {
    format!(
        ".version 9.0\n.target sm_90a\n.address_size 64\n\
         .extern .shared .align 1024 .b8 dynamic_shared_memory[];\n\
         .visible .entry test(\n.param .align 8 .b8 test_param_0[16]\n)\n{directives}{{\n\
         .reg .pred %p<10>;\n.reg .b16 %rs<10>;\n.reg .b32 %r<40>;\n.reg .b32 %t;\n.reg .b32 %c;\n.reg .b32 %s;\n\
         .reg .b64 %rd<20>;\n.reg .b64 %out;\n.reg .b64 %in;\n\
         mov.u32 %t, %tid.x;\nmov.u32 %c, %cluster_ctarank;\nmov.u32 %s, dynamic_shared_memory;\n\
         ld.param.u64 %out, [test_param_0];\nld.param.u64 %in, [test_param_0+8];\n\
         mov.u32 %r0, %ctaid.x;\nmov.u32 %r1, %ntid.x;\nmul.lo.s32 %r0, %r0, %r1;\nadd.s32 %r0, %r0, %t;\n\
         mul.wide.u32 %rd0, %r0, {OUT_BYTES};\nadd.s64 %out, %out, %rd0;\nsetp.eq.s32 %p0, %t, 0;\n\
         {body}\nret;\n}}\n"
    )
}

/// Runs a text by blocks of a warp; their threads' words of results, or the error.
fn launch(text: &str, grid: u32, seed: u64) -> Result<Vec<Vec<u32>>, String> {
    let kernel = Kernel::parse(text)?;
    let mut memory = Memory::default();
    let out_bytes = OUT_BYTES * 32 * grid as usize;
    memory.put(OUT, vec![0; out_bytes]);
    memory.put(IN, (0..IN_BYTES).map(|i| i as u8).collect());
    let params = [OUT.to_le_bytes(), IN.to_le_bytes()].concat();
    let launch = Launch { grid, block: 32, shared_bytes: 4096, params: &params, seed };
    run(&kernel, &launch, &mut memory)?;
    let word = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes);
    let out = memory.slice(OUT, out_bytes)?;
    Ok(out.chunks(OUT_BYTES).map(|out| out.as_chunks().0.iter().map(word).collect()).collect())
}

/// By clusters of two.
fn words(body: &str, grid: u32, seed: u64) -> Vec<Vec<u32>> {
    launch(&text(PAIRS, body), grid, seed).unwrap_or_else(|error| panic!("seed {seed}: {error}"))
}

/// Of one cluster of two.
fn error(body: &str) -> String {
    launch(&text(PAIRS, body), 2, 0).expect_err("is refused")
}

const ARRIVE: &str = "barrier.cluster.arrive.release.aligned;\n";
const WAIT: &str = "barrier.cluster.wait.acquire.aligned;\n";

/// A barrier of one arrival in each block, known to both.
fn barriers() -> String {
    format!(
        "@%p0 mbarrier.init.shared.b64 [%s], 1;\nfence.mbarrier_init.release.cluster;\n{ARRIVE}{WAIT}"
    )
}

/// Waits for the first phase of the own barrier.
const AWAIT: &str = "$L_again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%s], 0;\n\
     @!%p2 bra $L_again;\n";

/// The first thread of a block goes on to arrive at the barrier of the block of rank `%r2`.
fn arrive(opcode: &str) -> String {
    format!("mapa.shared::cluster.u32 %r3, %s, %r2;\n@%p0 {opcode} _, [%r3];\n")
}

const RELEASE: &str = "mbarrier.arrive.release.cluster.shared::cluster.b64";

#[test]
fn a_block_has_its_rank_and_its_own_shared_memory() {
    let body = "st.shared.u32 [%s], %c; bar.sync 0; ld.shared.u32 %r2, [%s]; mov.u32 %r3, %ctaid.x;\n\
        mapa.shared::cluster.u32 %r4, %s, %c; ld.shared.u32 %r5, [%r4];\n\
        st.global.v4.u32 [%out], {%r2, %c, %r3, %r5};";
    for directives in [PAIRS, ".reqnctapercluster\n\t2\n", ".maxntid 32, 1, 1\n"] {
        let size = if directives.contains("cluster") { 2 } else { 1 };
        for seed in SEEDS {
            let found = launch(&text(directives, body), 4, seed).unwrap();
            for (thread, words) in found.iter().enumerate() {
                let block = thread as u32 / 32;
                assert_eq!(words[..], [block % size, block % size, block, block % size]);
            }
        }
    }
}

#[test]
fn a_block_waits_for_arrivals_of_another() {
    // The first block writes to memory before it arrives at the barrier of the second.
    for opcode in [RELEASE, "mbarrier.arrive.shared::cluster.b64"] {
        let body = format!(
            "{}setp.ne.s32 %p1, %c, 0; @%p1 bra $L_again;\n\
             mov.u32 %r2, 1; mov.u32 %r4, 7; st.global.u32 [%in], %r4; bar.warp.sync -1;\n{}\
             bra $L_end;\n{AWAIT}ld.global.u32 %r5, [%in]; st.global.u32 [%out], %r5;\n\
             $L_end: {ARRIVE}{WAIT}",
            barriers(),
            arrive(opcode)
        );
        for seed in SEEDS {
            assert!(words(&body, 2, seed)[32..].iter().all(|words| words[0] == 7), "seed {seed}");
        }
    }
    let nobody = format!("{}{AWAIT}", barriers());
    let error = error(&nobody);
    assert!(error.contains("all wait: 64 threads from 0 of rank 0 on at"), "{error}");
    // The own barrier by its address in the cluster.
    let own = format!("{}mov.u32 %r2, %c;\n{}{AWAIT}", barriers(), arrive(RELEASE));
    words(&own, 2, 0);
}

/// Each block announces 64 bytes at its barrier, and copies 32 bytes to the blocks of a mask: the first to the place at 64, the
/// second other ones to the place at 96.
fn multicast(mask: &str) -> String {
    format!(
        "{}@%p0 mbarrier.arrive.expect_tx.shared.b64 %rd1, [%s], 64;\n\
         mul.lo.s32 %r2, %c, 32; add.s32 %r3, %s, %r2; add.s32 %r3, %r3, 64;\n\
         cvt.u64.u32 %rd2, %r2; add.s64 %rd2, %in, %rd2; mov.u16 %rs1, {mask};\n\
         @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r3], [%rd2],\n\
         32, [%s], %rs1;\n\
         {AWAIT}ld.shared.u32 %r4, [%s+64]; ld.shared.u32 %r5, [%s+96];\n\
         st.global.v2.u32 [%out], {{%r4, %r5}};\n{ARRIVE}{WAIT}",
        barriers()
    )
}

#[test]
fn a_copy_goes_to_every_block_of_its_mask() {
    for seed in SEEDS {
        let found = words(&multicast("3"), 4, seed);
        let expected = [0x0302_0100, 0x2322_2120];
        assert!(found.iter().all(|words| words[..2] == expected), "seed {seed}: {found:?}");
    }
    for (mask, expected) in [
        ("0", "the mask 0x0 of a cluster of 2 blocks"),
        ("5", "the mask 0x5 of a cluster of 2 blocks"),
        ("1", "all wait"),
    ] {
        let error = error(&multicast(mask));
        assert!(error.contains(expected), "{mask}: {error}");
    }
}

#[test]
fn a_cluster_s_barrier_waits_for_all_its_blocks() {
    // Each block reads what the other one wrote before the barrier, twice over.
    let body = format!(
        "xor.b32 %r2, %r0, 32; mul.wide.u32 %rd1, %r2, {OUT_BYTES}; sub.s64 %rd2, %out, %rd0;\n\
         add.s64 %rd1, %rd1, %rd2; add.s32 %r3, %r0, 100;\n\
         st.global.u32 [%out], %r3; {ARRIVE} st.global.u32 [%out+4], %r3; {WAIT}\n\
         ld.global.u32 %r4, [%rd1]; st.global.u32 [%out+8], %r4;\n\
         barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n\
         ld.global.u32 %r4, [%rd1+8]; st.global.u32 [%out+12], %r4;"
    );
    for seed in SEEDS {
        for (thread, words) in words(&body, 4, seed).iter().enumerate() {
            let (own, other) = (thread as u32 + 100, (thread as u32 ^ 32) + 100);
            assert_eq!(words[..], [own, own, other, own], "seed {seed}");
        }
    }
}

#[test]
fn a_cluster_s_barrier_is_come_to_and_waited_at_in_turn() {
    let twice = error(&format!("{ARRIVE}{ARRIVE}{WAIT}"));
    assert!(twice.contains("arrives twice at the cluster's barrier"), "{twice}");
    let never = error(WAIT);
    assert!(never.contains("without having arrived"), "{never}");
    // The first block waits for the second, which waits for an arrival that never comes.
    let stuck = error(&format!(
        "@%p0 mbarrier.init.shared.b64 [%s], 1; bar.sync 0; setp.ne.s32 %p1, %c, 0;\n\
         @%p1 bra $L_again;\n{ARRIVE}{WAIT} bra $L_end;\n{AWAIT}$L_end: mov.u32 %r1, 0;"
    ));
    assert!(stuck.contains("32 threads from 0 of rank 0 on at"), "{stuck}");
    assert!(stuck.contains("32 threads from 0 of rank 1 on at"), "{stuck}");
    // A block that has ended holds nobody back.
    let alone = format!("setp.ne.s32 %p1, %c, 0; @%p1 bra $L_end;\n{ARRIVE}{WAIT}$L_end: ret;");
    words(&alone, 2, 0);
}

#[test]
fn a_block_that_has_ended_has_no_shared_memory() {
    // The first block ends; the second has something for it. They run in this order without a seed.
    let late = |what: &str| {
        error(&format!(
            "{}setp.eq.s32 %p1, %c, 0; @%p1 bra $L_end;\nmov.u32 %r2, 0;\n\
             {what}\n$L_end: mov.u32 %r1, 0;",
            barriers()
        ))
    };
    let arrival = late(&arrive(RELEASE));
    assert!(arrival.contains("the block of rank 0 has ended"), "{arrival}");
    let copy = late(
        "@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%s+64], [%in],\n\
         32, [%s], 3;",
    );
    assert!(copy.contains("the block of rank 0 has ended"), "{copy}");
    // A copy that is under way when a block ends.
    let early = error(&format!(
        "{}setp.eq.s32 %p1, %c, 1; @%p1 bra $L_end; @!%p0 bra $L_end;\n\
         cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%s+64], [%in],\n\
         32, [%s], 2;\n$L_end: mov.u32 %r1, 0;",
        barriers()
    ));
    assert!(early.contains("the block ends before Bulk"), "{early}");
}

#[test]
fn what_reaches_beyond_a_block_is_refused() {
    for (body, expected) in [
        ("mapa.shared::cluster.u32 %r2, %s, 2;", "rank 2 of a cluster of 2 blocks"),
        (
            "mapa.shared::cluster.u32 %r2, %s, 1; mapa.shared::cluster.u32 %r2, %r2, 0;",
            "is not in the window of its own block, of rank 0",
        ),
        (
            "mapa.shared::cluster.u32 %r2, %s, 1; ld.shared.u32 %r3, [%r2];",
            "0x400 of rank 1, expected one of rank 0",
        ),
        ("mov.u32 %r2, 0x3000400; ld.shared.u32 %r3, [%r2];", "in none of the cluster's 2 blocks"),
    ] {
        let error = error(body);
        assert!(error.contains(expected), "{body}: {error}");
        assert!(error.contains("thread 0 of rank 0, line"), "{body}: {error}");
    }
}

#[test]
fn a_grid_is_whole_clusters() {
    let refused = |directives: &str, grid| launch(&text(directives, ""), grid, 0).unwrap_err();
    assert_eq!(refused(PAIRS, 3), "test: 3 blocks are not whole clusters of 2");
    let open = refused(".explicitcluster\n", 2);
    assert!(open.contains("without a .reqnctapercluster"), "{open}");
    for numbers in ["0", "2, 2, 1", "17", "2, 1, 1, 1"] {
        let error = refused(&format!(".reqnctapercluster {numbers}\n"), 68);
        assert!(error.contains(numbers) && error.contains("expected 1 to 16"), "{error}");
    }
}
