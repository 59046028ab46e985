//! The machine runs kernels, and says what is wrong with one.

use spec_emu::{Arena, Launch, Schedule, launch};

#[test]
fn every_lane_gets_the_sum_of_its_warp() {
    let arena = Arena::new(1 << 20);
    let input: Vec<u8> = (0..192).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let (from, to) = (arena.put(&input), arena.alloc(input.len()));
    let params = [from.to_le_bytes(), to.to_le_bytes()].concat();
    let launched =
        Launch { variant: "probe", grid: 3, block: 64, params: &params, ..Launch::default() };
    for seed in 0..20 {
        launch(&launched, &Schedule::seeded(seed)).unwrap();
        let mut output = vec![0; input.len()];
        arena.read(to, &mut output);
        for (i, bytes) in output.chunks_exact(4).enumerate() {
            let first = i / 32 * 32;
            let expected: usize = (first..first + 32).sum();
            assert_eq!(f32::from_le_bytes(bytes.try_into().unwrap()), expected as f32);
        }
    }
}
